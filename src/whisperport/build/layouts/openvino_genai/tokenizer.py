"""Make OpenVINO's graphs of a tokenizer, in the app's own environment.

python tokenizer.py FOLDER      reads tokenizer.json in FOLDER, and writes the graphs there

Standard input stays open until it ends: at its end, the process that asks has ended.
"""

import json
import os
import sys
import threading
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"


def main(folder: Path) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from transformers import PreTrainedTokenizerFast

    stored = json.loads((folder / "tokenizer.json").read_bytes())
    special = [token["content"] for token in stored["added_tokens"] if token["special"]]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        clean_up_tokenization_spaces=False,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[token for token in special if token != END_OF_TEXT],
    )
    graphs = convert_tokenizer(tokenizer, with_detokenizer=True, clean_up_tokenization_spaces=False)
    for graph, name in zip(graphs, ("tokenizer", "detokenizer"), strict=True):
        openvino.save_model(graph, folder / f"openvino_{name}.xml")


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
