"""Implicit arrays stand for a dense array without holding it; any JAX function runs on them, by rules per primitive."""

from . import _control as _control  # registers the rules of control flow
from . import _identity as _identity  # registers the rules of primitives that change no value
from ._array import Deferred as Deferred
from ._array import ImplicitArray as ImplicitArray
from ._array import aux_field as aux_field
from ._array import is_implicit as is_implicit
from ._array import materialize as materialize
from ._explain import Explanation as Explanation
from ._explain import explain as explain
from ._jaxprs import Writer as Writer
from ._jaxprs import inlined as inlined
from ._jaxprs import rewritten as rewritten
from ._jaxprs import without_dead as without_dead
from ._observe import MaterializationError as MaterializationError
from ._observe import MaterializationWarning as MaterializationWarning
from ._observe import materialization_error as materialization_error
from ._observe import note_materialized as note_materialized
from ._observe import serving as serving
from ._observe import unobserved as unobserved
from ._rules import materialize_rule as materialize_rule
from ._rules import register as register
from ._ste import ste as ste
from ._trace import implicit as implicit
from ._trace import scan_counts as scan_counts
from ._trace import use_implicit as use_implicit
from ._tree import tree_average as tree_average
from ._tree import tree_cast as tree_cast
from ._tree import tree_flatten_with_implicit as tree_flatten_with_implicit
from ._tree import tree_flatten_with_path_with_implicit as tree_flatten_with_path_with_implicit
from ._tree import tree_leaves_with_implicit as tree_leaves_with_implicit
from ._tree import tree_map_with_implicit as tree_map_with_implicit
from ._tree import tree_map_with_path_with_implicit as tree_map_with_path_with_implicit
from ._tree import tree_norm as tree_norm
from ._tree import tree_size as tree_size
from ._tree import tree_structure_with_implicit as tree_structure_with_implicit
