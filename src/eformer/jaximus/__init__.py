"""Implicit arrays stand for a dense array without holding it; any JAX function runs on them, by rules per primitive."""

from eformer._src.jaximus.array import ImplicitArray as ImplicitArray
from eformer._src.jaximus.array import aux_field as aux_field
from eformer._src.jaximus.array import is_implicit as is_implicit
from eformer._src.jaximus.array import materialize as materialize
from eformer._src.jaximus.explain import Explanation as Explanation
from eformer._src.jaximus.explain import explain as explain
from eformer._src.jaximus.instrumentation import MaterializationError as MaterializationError
from eformer._src.jaximus.instrumentation import MaterializationWarning as MaterializationWarning
from eformer._src.jaximus.instrumentation import materialization_error as materialization_error
from eformer._src.jaximus.instrumentation import note_materialized as note_materialized
from eformer._src.jaximus.rules import materialize_rule as materialize_rule
from eformer._src.jaximus.rules import register as register
from eformer._src.jaximus.ste import ste as ste
from eformer._src.jaximus.trace import implicit as implicit
from eformer._src.jaximus.tree import tree_average as tree_average
from eformer._src.jaximus.tree import tree_cast as tree_cast
from eformer._src.jaximus.tree import tree_flatten_with_implicit as tree_flatten_with_implicit
from eformer._src.jaximus.tree import tree_flatten_with_path_with_implicit as tree_flatten_with_path_with_implicit
from eformer._src.jaximus.tree import tree_leaves_with_implicit as tree_leaves_with_implicit
from eformer._src.jaximus.tree import tree_map_with_implicit as tree_map_with_implicit
from eformer._src.jaximus.tree import tree_map_with_path_with_implicit as tree_map_with_path_with_implicit
from eformer._src.jaximus.tree import tree_norm as tree_norm
from eformer._src.jaximus.tree import tree_size as tree_size
from eformer._src.jaximus.tree import tree_structure_with_implicit as tree_structure_with_implicit
from eformer._src.public import name_publicly as _name_publicly

use_implicit = implicit  # the documented name

_name_publicly(globals())
