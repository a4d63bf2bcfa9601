"""Makes docs/report.png: the first screen of a report, as `meshloom compile` writes it for a slice of TPUs.

    pip install -e '.[tpu]' && apt-get install chromium && python bench/report_picture.py [RUN_DIR]

Without RUN_DIR the step is compiled first, four layers of Llama 3 8B for 64 TPU v6e chips; no TPU is needed.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

PICTURE = Path(__file__).parents[1] / "docs" / "report.png"
OVERRIDES = ("model=llama3_8b", "model.num_layers=4", "target=v6e-64", "global_batch_size=256", "sequence_length=2048",
             "remat=full", "data=synthetic", "overlap.flag_presets=[sparse_core]")  # fmt: skip
WIDTH, HEIGHT = 1160, 1440


def compile_step(run_dir: Path) -> None:
    subprocess.run(["meshloom", "compile", *OVERRIDES, f"hydra.run.dir={run_dir}"], check=True)


def take_picture(page: Path, picture: Path) -> None:
    """Writes what a browser shows of the page before it is scrolled, in the light colour scheme."""
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
               f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}", page.resolve().as_uri()]  # fmt: skip
    subprocess.run(command, check=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(sys.argv[1] if len(sys.argv) > 1 else folder)
        if len(sys.argv) == 1:
            compile_step(run_dir)
        take_picture(run_dir / "report.html", PICTURE)
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
