"""An HLO module as a message: the fields of it that `read_hlo` needs.

Source: field numbers from xla/service/hlo.proto and xla/xla_data.proto of https://github.com/openxla/xla,
commits 0b8fa9f and 011b758 (2025).
"""

from whisperport.system.protobuf import Field, message_class

SCHEMA: dict[str, tuple[Field, ...]] = {
    "Module": (
        ("name", 1, "string"),
        ("computations", 3, "[Computation]"),
        ("entry_computation_id", 6, "int64"),
        ("input_output_alias", 8, "Aliases"),
    ),
    "Aliases": (("entries", 1, "[Alias]"),),
    "Alias": (
        ("output_shape_index", 1, "[int64]"),
        ("parameter_number", 2, "int64"),
        ("parameter_shape_index", 3, "[int64]"),
    ),
    "Computation": (
        ("name", 1, "string"),
        ("instructions", 2, "[Instruction]"),
        ("id", 5, "int64"),
        ("root_id", 6, "int64"),
    ),
    "Instruction": (
        ("name", 1, "string"),
        ("opcode", 2, "string"),
        ("shape", 3, "Shape"),
        ("parameter_number", 9, "int64"),
        ("tuple_index", 13, "int64"),
        ("dimensions", 14, "[int64]"),
        ("convolution", 16, "Convolution"),
        ("slices", 17, "[Slice]"),
        ("custom_call_target", 28, "string"),
        ("dot", 30, "Dot"),
        ("id", 35, "int64"),
        ("operand_ids", 36, "[int64]"),
        ("called_computation_ids", 38, "[int64]"),
        ("groups", 50, "int64"),
        ("comparison_direction", 63, "string"),
    ),
    "Shape": (
        ("element_type", 2, "int32"),
        ("dimensions", 3, "[int64]"),
        ("tuple_shapes", 4, "[Shape]"),
        ("is_dynamic", 6, "[int32]"),
    ),
    "Dot": (
        ("lhs_contracting", 1, "[int64]"),
        ("rhs_contracting", 2, "[int64]"),
        ("lhs_batch", 3, "[int64]"),
        ("rhs_batch", 4, "[int64]"),
    ),
    "Convolution": (("kernel_output_feature", 4, "int64"),),
    "Slice": (("stride", 3, "int64"),),
}
MODULE = message_class(SCHEMA, "Module")
