"""Expected outputs with their channels in the order of a file, so that the file is compared as usual."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from whisperport.program.runner import Array
from whisperport.verification.diagnosis.expected import Expected, ExpectedTensor, Simulate
from whisperport.verification.diagnosis.explaining import Explanation, on_frames
from whisperport.verification.diagnosis.geometries import Geometry, undone
from whisperport.verification.diagnosis.reference_outputs import ReferenceOutput

Doubles = NDArray[np.float64]


def moved_channels(expected: Expected, tensor: ExpectedTensor, geometry: Geometry) -> Expected:
    """Return the expected outputs with their channels in the order of a file."""

    def of(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        if tensor.name not in arrays or arrays[tensor.name].size != tensor.array.size:
            return {}
        output = ReferenceOutput.of(tensor, arrays[tensor.name], (), "")
        values = output.from_frames(output.frames[:, geometry.channel_map])
        return {tensor.name: values.reshape(tensor.array.shape)}

    def simulating(own: Simulate) -> Simulate:
        return lambda recipes: {name: of(arrays) for name, arrays in own(recipes).items()}

    return replace(
        expected,
        tensors=(replace(tensor, array=of({tensor.name: tensor.array})[tensor.name]),),
        make_alternatives=lambda: [
            replace(a, arrays=of(a.arrays), simulate=simulating(a.simulate))
            for a in expected.alternatives
        ],
        simulate=simulating(expected.simulate),
        known=of(expected.known),
    )


def channels_moved_back(explanation: Explanation, geometry: Geometry) -> Explanation:
    """Return an explanation of moved channels with the channels in the expected order."""
    reference = explanation.reference

    def back(array: Doubles) -> Doubles:
        return reference.from_frames(undone(geometry, reference.in_frames(array)))

    return replace(
        explanation,
        reference=replace(reference, array=back(reference.array)),
        findings=(*geometry.findings, *explanation.findings),
        code=(*explanation.code, *on_frames(reference, geometry.code)),
        corrected=back(explanation.corrected),
    )
