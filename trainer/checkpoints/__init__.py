"""Checkpoints: one folder a version, one file a server, and a state that makes them whole. No torch, no sockets.

``DIR/checkpoints/00001234/`` holds ``slice-000-of-002-GENERATION.safetensors`` ... (``values`` float32 [end-begin],
``momentum`` float32 [parameters of the range]) and ``state.json``. It is whole when the state and all slices it counts
are there; every file appears complete under its name or not at all, whatever is killed or full, and lasts through a power
cut. The state comes last. It counts slices of its own generation only, so no history completes or overwrites a checkpoint
of another. ``generations.json`` says where each generation began: what earlier ones wrote beyond that is not whole."""
