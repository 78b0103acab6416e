"""What happens in a step: tensors, averaging beside the gradient, what is measured."""
