"""A stretch of a trace done again."""

from framework.memory.trace import Kind, Operation, Trace


def test_a_repeated_step_makes_again_what_died_and_keeps_what_outlived_it() -> None:
    trace = Trace()
    trace.enter("end")
    activation = trace.bear(100, Kind.ACTIVATIONS)
    trace.operations.append(Operation("mul", "end", 0, 100, "float32"))
    trace.enter("optimizer_step")
    state = trace.bear(50, Kind.OPTIMIZER)
    trace.makers[state] = len(trace.operations)
    trace.operations.append(Operation("zeros_like", "optimizer_step", 0, 50, "float32"))
    trace.bury(activation)
    trace.enter("end")
    trace.repeat(0, 2)
    assert trace.events[-2:] == [2, ~2]
    assert (trace.sizes[2], trace.kinds[2]) == (100, Kind.ACTIVATIONS)
    assert [operation.name for operation in trace.operations] == ["mul", "zeros_like", "mul"]
    assert [(mark.phase, mark.event) for mark in trace.marks[3:]] == [("end", 3), ("optimizer_step", 4)]


def test_work_of_the_first_step_alone_is_not_repeated() -> None:
    trace = Trace()
    trace.enter("forward")
    for kind in (Kind.ACTIVATIONS, Kind.TEMPORARIES):
        trace.bury(trace.bear(100, kind))
    trace.unrepeated.add(1)
    trace.enter("end")
    trace.repeat(0, 1)
    assert trace.kinds == [Kind.ACTIVATIONS, Kind.TEMPORARIES, Kind.ACTIVATIONS]
    assert trace.events == [0, ~0, 1, ~1, 2, ~2]
