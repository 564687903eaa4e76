"""Before the first step: read inputs, plan, build, verify."""
