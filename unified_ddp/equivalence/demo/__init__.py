"""`unified-ddp verify`: trains one small net in torch and in JAX, in lockstep on the same shards, and compares both
frameworks' reduced gradients with each other and with the mean of what plain autograd gives on each rank.

Each rank of torch and the JAX side run in processes of their own, so importing this package loads neither framework.
"""

from unified_ddp.equivalence.demo.config import Fault, Side, VerifyConfig, VerifyError
from unified_ddp.equivalence.demo.run import run_verify
from unified_ddp.equivalence.demo.verdict import VerifyReport

__all__ = ["Fault", "Side", "VerifyConfig", "VerifyError", "VerifyReport", "run_verify"]
