"""TinyLM in the tools of Hugging Face: config, model and cached generation for transformers.

Importing this package registers both classes with AutoConfig and AutoModelForCausalLM. `register()`
adds attention implementations for other models.
"""

import sys

from nsa.config.describe import install_line

try:
    import transformers
except ImportError as error:
    raise ImportError(
        f"nsa.hf needs transformers 5.17 or later, which cannot be imported ({error}); "
        f"install it with `{install_line('hf')}`"
    ) from error

from nsa.generate.rows import GenerationCache
from nsa.hf.attention import register
from nsa.hf.config import NSAConfig
from nsa.hf.layout import Sizes, sizes
from nsa.hf.model import NSAForCausalLM

transformers.AutoConfig.register(NSAConfig.model_type, NSAConfig)
transformers.AutoModelForCausalLM.register(NSAConfig, NSAForCausalLM)
# `transformers serve` looks for the class that a config.json names in the module transformers, as
# it was when its own code was imported: transformers imports itself anew with its processors.
_serve = sys.modules.get("transformers.cli.serving.model_manager")
for _module in (transformers, getattr(_serve, "transformers", transformers)):
    vars(_module)[NSAForCausalLM.__name__] = NSAForCausalLM

__all__ = ["GenerationCache", "NSAConfig", "NSAForCausalLM", "Sizes", "register", "sizes"]
