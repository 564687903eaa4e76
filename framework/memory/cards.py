from framework.schema.choices import MixedPrecision


def best_autocast(card):
    return MixedPrecision.NONE
