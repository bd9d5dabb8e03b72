"""Checkpoints: a folder per version, with a file per server and a state that completes them. No torch, no sockets.

``DIR/checkpoints/00001234/`` holds ``slice-000-of-002-GENERATION.safetensors`` ... (``values`` float32 [end-begin],
``momentum`` float32 [slots * parameters of the range], with one slot for SGD and two for Adam) and ``state.json``, which
is written last. The checkpoint is complete once the state and all slices that it counts are there. Files are written
atomically and durably. A state only counts slices of its own generation, so a generation can neither complete nor
overwrite a checkpoint of another. ``generations.json`` records at which version each generation began; later checkpoints
of earlier generations are void."""
