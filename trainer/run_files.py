"""The names of the files in a run's folder."""

CONFIG = "config.json"  # whose folder it is: written before anything else, removed first
METRICS = "metrics.jsonl"  # an event a line
PUSHES = "pushes.csv"  # a pushed gradient a line
CHECKPOINTS = "checkpoints"
LOGS = "logs"
PREPARE_LOG = "prepare.log"  # in LOGS; of the leading host, if several share the folder
TENSORBOARD = "tensorboard"
# of the end, and of the best evaluation
MODEL = "model.safetensors"
BEST = "best.safetensors"
BEST_OF = "best.json"  # which evaluation BEST is of
RESULT = "result.json"
REPORT = "report.html"
EXAMPLES = "examples"  # with --example-ledger: Parquet files with the losses of trained rows, one per checkpoint
FOLLOWED = "followed"  # a file for each time that a worker went on with rows that were appended to the set
WORKERS = "workers.json"  # a request of `sharding workers` that the run has not answered
ROWS = "rows"  # during a run: decoded rows, if they are mapped, and the mean image, in a folder per host
LOCK = ".lock"
# Of a run whose home is no local folder:
LEASE = ".lease"  # numbered files, LOCK's counterpart
NEWS = ".news"  # in the work folder of the host that leads: grows when the home has another checkpoint
SEGMENTS = "segments"  # what was appended to METRICS and PUSHES since they were written there
