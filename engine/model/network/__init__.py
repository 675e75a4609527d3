"""The layers of a model as operations on tensors; knows a device only as the operations it is given."""
