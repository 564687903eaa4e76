"""The training step as a dry run on meta tensors, recorded by a tracker."""
