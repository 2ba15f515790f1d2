"""Write the tables of README.md: the vendors with their status, and the times of other implementations.

    python docs/make_readme.py

Statuses follow from the recorded evidence, and times from the results of `make bench-peers`.
"""

import json
import re
from pathlib import Path

from whisperport.targets import TARGETS
from whisperport.verification.project_evidence import status_words

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PEERS = ROOT / "benchmarks" / "results" / "peers.json"
HOW_TO = "docs/how-to/"

# Folder or module of `whisperport.targets` -> what it is, and the page to read.
VENDORS = {
    "onnxruntime": ("ONNX Runtime, any CPU", "docs/tutorials/first-bundle.md"),
    "openvino": ("OpenVINO, CPUs", f"{HOW_TO}place-programs.md"),
    "litert": ("LiteRT (TensorFlow Lite), CPUs", f"{HOW_TO}place-programs.md"),
    "xnnpack": ("ExecuTorch with XNNPACK, CPUs", f"{HOW_TO}fix-a-program.md"),
    "qualcomm": ("Qualcomm Hexagon", f"{HOW_TO}qualcomm-snapdragon.md"),
    "rockchip": ("Rockchip", f"{HOW_TO}rockchip-rk3588.md"),
    "ethos_u": ("Arm Ethos-U", f"{HOW_TO}ethos-u85.md"),
    "hailo": ("Hailo", f"{HOW_TO}raspberry-pi-hailo.md"),
    "mediatek": ("MediaTek Genio", f"{HOW_TO}mediatek-genio.md"),
    "aws_neuron": ("AWS Inferentia, Trainium", f"{HOW_TO}aws-neuron.md"),
}
# Columns and rows of the table of times: as the results name them -> as the README does.
CASES = {
    ("tiny", "one window, 64 tokens"): "tiny",
    ("embedded", "a command of 3 s"): "3 s",
    ("embedded", "100 short files"): "100 short files",
    ("embedded", "10 minutes"): "10 minutes",
}
CONTENDERS = {
    "whisperport": "whisperport, float32",
    "openvino-genai fp32": "openvino-genai, float32",
    "faster-whisper fp32": "faster-whisper, float32",
    "whisper.cpp f16": "whisper.cpp, float16 weights",
    "whisperport, bf16 encoder": "whisperport, encoder in bfloat16",
    "openvino-genai int8, defaults": "openvino-genai, int8, bfloat16",
}


def main() -> None:
    """Replace the marked parts of README.md."""
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")


def with_tables(text: str) -> str:
    """Return the README with both tables as they are now."""
    for name, part in (("peers", _peers()), ("vendors", _vendors())):
        marked = rf"(?<=<!-- generated: {name} -->\n).*?(?=<!-- end -->)"
        found = re.search(marked, text, re.DOTALL)
        assert found, f"README.md has no mark for {name}"
        text = text[: found.start()] + part + text[found.end() :]
    return text


def _vendors() -> str:
    rows = [
        f"| [{title}]({page}) | {_statuses(folder)} |\n"
        for folder, (title, page) in VENDORS.items()
    ]
    return "| Runtime or chip | Status |\n|---|---|\n" + "".join(rows)


def _statuses(folder: str) -> str:
    """Each status of the vendor's targets, followed by the targets that have it."""
    targets: dict[str, list[str]] = {}
    for target in TARGETS:
        if type(target).__module__.removeprefix("whisperport.targets.").split(".")[1] == folder:
            targets.setdefault(status_words(target.spec.name), []).append(f"`{target.spec.name}`")
    return "<br>".join(f"{', '.join(names)}: {status}" for status, names in targets.items())


def _peers() -> str:
    results = json.loads(PEERS.read_text(encoding="utf-8"))["peers_with_short_windows"]
    measured = {
        (row["contender"], row["model"], row["case"]): row["ratio"] for row in results["rows"]
    }
    rows = [
        f"| {title} | " + " | ".join(f"{measured[contender, *case]:.2f}" for case in CASES) + " |\n"
        for contender, title in CONTENDERS.items()
    ]
    machine = results["machine"]
    note = (
        f"{machine['cpu']}, {machine['cores']} cores, {results['threads']} threads, "
        f"{results['measured_on']}, `make bench-peers` ([results]({PEERS.relative_to(ROOT)})).\n"
    )
    heading = f"| Time, relative to the first row | {' | '.join(CASES.values())} |\n"
    return heading + "|---" * (1 + len(CASES)) + "|\n" + "".join(rows) + "\n" + note


if __name__ == "__main__":
    main()
