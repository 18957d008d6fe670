"""The pictures of docs/gallery.md: ``python -m docs.gallery``, or ``make docs``.

Two models of transformers, made small in width but with their own kinds of layers, are transformed with a fake process
group; a headless Chromium opens their `graph.html` at the sights below and keeps what it shows. Where no Chromium is
found the pictures are left as they are, with a message.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import ep_fx

FOLDER = Path(__file__).parent / "gallery"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
MIXTRAL, DEEPSEEK = "mixtral", "deepseek"
SIGHTS: dict[str, tuple[str, str]] = {
    "structure": (MIXTRAL, "view=structure&at=model.layers.0.mlp"),
    "structure-layers": (MIXTRAL, "view=structure&fold=all&open=model,model.layers"),
    "schedule": (DEEPSEEK, "view=schedule"),
    "schedule-experts": (MIXTRAL, "view=schedule&at=model.layers.1"),
    "passes": (MIXTRAL, "view=passes&step=2"),
}
"""File name: model, and what stands behind ``#`` in the address."""
_SMALL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4,
}


def main() -> int:
    """Writes the pictures; 0 also where there is nothing to write them with. ``--check`` writes nothing."""
    if "--check" in sys.argv:
        return 0
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        print(f"docs/gallery: no Chromium ({', '.join(BROWSERS)}) on the path, pictures left as they are")
        return 0
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        pages = {name: _page(name, Path(folder) / f"{name}.html") for name in (MIXTRAL, DEEPSEEK)}
        for name, (model, state) in SIGHTS.items():
            _shoot(browser, f"{pages[model].as_uri()}#{state}", FOLDER / f"{name}.png")
            print(f"gallery/{name}.png written")
    return 0


def _page(name: str, path: Path) -> Path:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    ids = torch.randint(3, 500, (2, 8))
    return ep_fx.transform(_model(name), mesh, example_kwargs={"input_ids": ids}).visualize(path)


def _model(name: str) -> torch.nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, MixtralConfig, MixtralForCausalLM

    if name == MIXTRAL:
        return MixtralForCausalLM(MixtralConfig(**_SMALL, num_hidden_layers=8, num_local_experts=8))
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **_SMALL, num_hidden_layers=6, first_k_dense_replace=3, n_routed_experts=16, moe_intermediate_size=32,
            n_group=4, topk_group=2, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16,
            v_head_dim=16,
        )
    )  # fmt: skip


def _shoot(browser: str, address: str, path: Path) -> None:
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1"]
    arguments += ["--window-size=1600,1000", "--virtual-time-budget=4000", f"--screenshot={path}", address]
    subprocess.run([browser, *arguments], check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    sys.exit(main())
