"""The documented handlers of primitives, for all formats that have them, by name.

They are there to be called. What `implicit` dispatches to are the rules; a handler that has one runs it. A format's
documented module has their names by importing all of these.
"""

from __future__ import annotations

from jax import lax

from . import _handlers as handlers

add_1bit_xy, add_8bit_xy, add_nf4_xy = handlers.dense("add_{}_xy", lax.add, "x, y")
broadcast_in_dim_1bit_operand, broadcast_in_dim_8bit_operand, broadcast_in_dim_nf4_operand = handlers.moved(
    "broadcast_in_dim_{}_operand", lax.broadcast_in_dim, "operand, *args, **params"
)
concatenate_1bit_operands, concatenate_8bit_operands, concatenate_nf4_operands = handlers.dense(
    "concatenate_{}_operands", lax.concatenate, "operands, *args, **kwargs"
)
conv_general_dilated_1bit_lhs_rhs, conv_general_dilated_8bit_lhs_rhs, conv_general_dilated_nf4_lhs_rhs = handlers.dense(
    "conv_general_dilated_{}_lhs_rhs", lax.conv_general_dilated, "lhs, rhs, *args, **kwargs"
)
convert_element_type_1bit_operand_kw, convert_element_type_8bit_operand_kw, convert_element_type_nf4_operand_kw = (
    handlers.by_rule("convert_element_type_{}_operand_kw", lax.convert_element_type, "operand, **kwargs")
)
convert_element_type_1bit_operand_pos, convert_element_type_8bit_operand_pos, convert_element_type_nf4_operand_pos = (
    handlers.by_rule("convert_element_type_{}_operand_pos", lax.convert_element_type, "operand, new_dtype")
)
div_1bit_xy, div_8bit_xy, div_nf4_xy = handlers.dense("div_{}_xy", lax.div, "x, y")
div_1bit_xy_fallback, _, _ = handlers.dense("div_{}_xy_fallback", lax.div, "x, y")
dot_general_1bit_lhs_rhs, dot_general_8bit_lhs_rhs, dot_general_nf4_lhs_rhs = handlers.by_rule(
    "dot_general_{}_lhs_rhs", lax.dot_general, "lhs, rhs, *args, **kwargs"
)
exp_1bit_x, exp_8bit_x, exp_nf4_x = handlers.dense("exp_{}_x", lax.exp, "x, *args, **kwargs")
gather_1bit_operand, gather_8bit_operand, gather_nf4_operand = handlers.by_rule(
    "gather_{}_operand", lax.gather, "operand, *args, **kwargs"
)
integer_pow_1bit_x, integer_pow_8bit_x, integer_pow_nf4_x = handlers.dense(
    "integer_pow_{}_x", handlers.integer_pow, "x, **kwargs"
)
integer_pow_1bit_xy, integer_pow_8bit_xy, integer_pow_nf4_xy = handlers.dense(
    "integer_pow_{}_xy", handlers.integer_pow, "x, y"
)
log_1bit_x, log_8bit_x, log_nf4_x = handlers.dense("log_{}_x", lax.log, "x, *args, **kwargs")
lt_1bit_xy, lt_8bit_xy, lt_nf4_xy = handlers.dense("lt_{}_xy", lax.lt, "x, y, **kwargs")
max_1bit_xy, max_8bit_xy, max_nf4_xy = handlers.dense("max_{}_xy", lax.max, "x, y, *args, **kwargs")
mul_1bit_xy, mul_8bit_xy, mul_nf4_xy = handlers.dense("mul_{}_xy", lax.mul, "x, y")
reduce_1bit_operand_init_value, reduce_8bit_operand_init_value, reduce_nf4_operand_init_value = handlers.dense(
    "reduce_{}_operand_init_value", lax.reduce, "operand, init_value, *args, **kwargs"
)
reshape_1bit_operand, reshape_8bit_operand, reshape_nf4_operand = handlers.moved(
    "reshape_{}_operand", lax.reshape, "operand, *args, **params"
)
sqrt_1bit_x, sqrt_8bit_x, sqrt_nf4_x = handlers.dense("sqrt_{}_x", lax.sqrt, "x, **kwargs")
transpose_1bit_operand, transpose_8bit_operand, transpose_nf4_operand = handlers.moved(
    "transpose_{}_operand", lax.transpose, "operand, *args, **kwargs"
)
