import os

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here needs it: configurations are made and weights are random
