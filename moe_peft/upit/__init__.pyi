from .expand import expand_experts
from .pipeline import UpIT
from .post_train import post_train
from .prepare import prepare_experts
from .recipe import Recipe, load_recipe, recipe_from_dict
from .router_init import init_routers

__all__ = [
    "Recipe",
    "UpIT",
    "expand_experts",
    "init_routers",
    "load_recipe",
    "post_train",
    "prepare_experts",
    "recipe_from_dict",
]
