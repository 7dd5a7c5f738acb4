from .expert_init import ExpertInit
from .export import export_adapter, verify_export
from .gguf import export_gguf
from .router_files import load_routers
from .upcycle import upcycle
from .upcycle_config import UpcycleConfig

__all__ = ["ExpertInit", "UpcycleConfig", "export_adapter", "export_gguf", "load_routers", "upcycle", "verify_export"]
