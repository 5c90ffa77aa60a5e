"""Access to private PyTorch APIs, through every public name of the modules below.

Other packages use private APIs only for tensor subclasses (`torch.utils._pytree`, `_python_dispatch`) and for stores.
`tests/fsdp/test_private.py` enforces this rule. It also tests the behavior expected of each private API, so that a
torch release that changes one fails a specific test.
"""

from infinity.torch_private.collectives import *  # noqa: F403
from infinity.torch_private.imports import TESTED as TESTED
from infinity.torch_private.module_init import *  # noqa: F403
from infinity.torch_private.names import *  # noqa: F403
from infinity.torch_private.passes import *  # noqa: F403
