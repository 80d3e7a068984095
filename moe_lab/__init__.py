"""moe_lab: learn, test and plan Mixture-of-Experts training systems.

The top-level names are loaded when first used, so that `import moe_lab` stays cheap.
"""
__version__ = "0.1.0"

from importlib import import_module

_where = {
    "Routing": "core.types", "Dispatch": "core.types", "Cluster": "core.types", "Placement": "core.types",
    "TopKGate": "routing.gate", "MoE": "experts.layer", "GPT": "models.gpt",
}
__all__ = list(_where)


def __getattr__(name):
    if name not in _where: raise AttributeError(f"module 'moe_lab' has no attribute {name!r}")
    return getattr(import_module(f"moe_lab.{_where[name]}"), name)


def __dir__(): return sorted([*globals(), *_where])
