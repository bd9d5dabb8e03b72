"""The transport of gradients and parameters: messages, sockets, shared memory."""
