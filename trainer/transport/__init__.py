"""What carries gradients and parameters: messages, sockets, shared memory."""
