"""Fix the dynamic sizes of a program that torch.export.save wrote, in its JSON and before torch reads it.

torch stores a dynamic size as text, such as "Mul(Integer(16), Symbol('s27', integer=True))", and evaluates
it as Python. Here it is parsed, and replaced by its value.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from types import MappingProxyType
from typing import Any

from whisperport.errors import ProgramError

NO_SIZES: Mapping[str, int] = MappingProxyType({})
MAX_SIZE = 2**40  # of any number in an expression; no tensor is larger
MAX_POWER = 8  # of a size
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "Integer": int,
    "Add": lambda *terms: sum(terms),
    "Mul": lambda *factors: math.prod(factors),
    "Pow": lambda base, exponent: _power(base, exponent),
    "Max": max,
    "Min": min,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "GreaterThan": operator.ge,
    "StrictGreaterThan": operator.gt,
    "LessThan": operator.le,
    "StrictLessThan": operator.lt,
    "And": lambda *operands: reduce(operator.and_, operands, True),
    "Or": lambda *operands: reduce(operator.or_, operands, False),
    "Not": operator.not_,
}


def _power(base: int, exponent: int) -> int:
    if not 0 <= exponent <= MAX_POWER:
        raise ValueError(f"a power of {exponent}")
    return int(base**exponent)


def symbols(program: Mapping[str, Any]) -> dict[str, str]:
    """Return the dynamic sizes of a program, such as s27 -> "2 to 64".

    Args:
        program: JSON of `models/NAME.json`, as torch 2.8 to 2.13 write it.
    """
    ranges: Mapping[str, Mapping[str, Any]] = program.get("range_constraints") or {}
    return {
        name: f"{_low(limits)} to {limits.get('max_val') or 'any'}"
        for name, limits in ranges.items()
    }


def dynamic_shapes(name: str, program: Mapping[str, Any]) -> ProgramError:
    """Return the error of a program with dynamic sizes where fixed ones are needed."""
    known = symbols(program)
    options = " ".join(f"--size {symbol}=NUMBER" for symbol in known)
    ranges = "; ".join(f"{symbol}: {limits}" for symbol, limits in known.items())
    return ProgramError(
        f"`{name}` has dynamic shapes",
        why=f"a size in the graph is a symbol ({ranges}); accelerators support static shapes only"
        if known
        else "a size in the graph is a symbol; accelerators support static shapes only",
        hint=f"give a number for each: `{options}`, or export again without `dynamic_shapes`"
        if known
        else "export again without `dynamic_shapes`",
    )


def not_fixable(name: str) -> ProgramError:
    """Return the error of sizes that are given for something else than a `.pt2` file."""
    return ProgramError(
        f"the sizes of {name} cannot be fixed",
        why="it is not a .pt2 file",
        hint="export the program again with static shapes",
    )


def fix_sizes(name: str, program: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the JSON of a program with numbers in place of its dynamic sizes.

    Args:
        name: of the program, for errors.
        program: see `symbols`.
        sizes: symbol -> number.

    Raises:
        ProgramError: a symbol is unknown or has no number, a number is out of range, or an expression is
            not supported.
    """
    known = symbols(program)
    for symbol, number in sizes.items():
        if symbol not in known:
            raise ProgramError(
                f"`{name}` has no dynamic size `{symbol}`",
                why=f"its dynamic sizes: {', '.join(known) or 'none'}",
                hint="give `--size` for these only",
            )
        limits = program["range_constraints"][symbol]
        if not _low(limits) <= number <= (limits.get("max_val") or MAX_SIZE):
            raise ProgramError(
                f"the size {symbol}={number} is not in the range of `{name}`",
                why=f"the program was exported for {known[symbol]}",
                hint="give a number of this range, or export the program with another range",
            )
    if known.keys() - sizes.keys():
        raise dynamic_shapes(name, program)
    try:
        fixed: dict[str, Any] = _replaced(program, sizes)
    except (
        SyntaxError,
        LookupError,
        TypeError,
        ValueError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise ProgramError(
            f"cannot compute the sizes of `{name}`",
            why=f"an expression of them is not supported: {error}"[:200],
            hint="export again without `dynamic_shapes`",
        ) from error
    return {**fixed, "range_constraints": {}, "guards_code": []}


def _low(limits: Mapping[str, Any]) -> int:
    return limits.get("min_val") or 0


def _replaced(data: Any, sizes: Mapping[str, int]) -> Any:
    """Copy JSON, with {"as_int": 8} or {"as_bool": true} in place of each {"as_expr": …}."""
    if isinstance(data, list):
        return [_replaced(item, sizes) for item in data]
    if not isinstance(data, dict):
        return data
    if expression := data.get("as_expr"):
        size = _value(ast.parse(expression["expr_str"], mode="eval").body, sizes)
        if not isinstance(size, bool) and not 0 <= size <= MAX_SIZE:
            raise ValueError(f"a size is {size}")
        return {"as_bool" if isinstance(size, bool) else "as_int": size}
    return {key: _replaced(item, sizes) for key, item in data.items()}


def _value(node: ast.expr, sizes: Mapping[str, int]) -> Any:
    match node:
        case ast.Constant(value=bool() | int() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, sizes)
        case ast.Name(id="true" | "false" as word):
            return word == "true"
        case ast.Call(func=ast.Name(id="Symbol"), args=[ast.Constant(value=str() as symbol)]):
            return sizes[symbol]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            result = _FUNCTIONS[name](*(_value(argument, sizes) for argument in args))
            if abs(result) > MAX_SIZE:  # also inside an expression: powers of powers have no end
                raise ValueError(f"{name} gives a number above {MAX_SIZE}")
            return result
    raise ValueError(ast.unparse(node)[:100])
