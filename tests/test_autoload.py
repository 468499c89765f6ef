"""Activation at `import torch`, with no import of ssa_hf: every case in a process of its own."""

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

pytestmark = pytest.mark.skipif(
    not any(entry.name == "ssa_hf" for entry in entry_points(group="torch.backends")),
    reason="ssa_hf is on the path but not installed: pip install -e .",
)

BUILD = """
from transformers import AutoModelForCausalLM, LlamaConfig
sizes = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=50, **sizes), attn_implementation="ssa")
assert model.model.layers[0].self_attn.ssa_norm.n.tolist() == [1.5, 1.5]
"""


def run(script, **environment):
    environment = {name: value for name, value in os.environ.items() if name != "SSA_HF_AUTOLOAD"} | environment
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "before",
    [
        "",
        "import torch",
        "from transformers import PreTrainedModel",  # imports torch from within modeling_utils
        "import transformers.modeling_utils, torch",
        "import torch, ssa_hf",
        "import transformers.modeling_utils, ssa_hf",
    ],
)
def test_ssa_works_whatever_is_imported_first(before):
    done = run(before + BUILD)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


def test_a_checkpoint_loads_with_its_options_and_no_import(tmp_path):
    script = f"import torch{BUILD}model.save_pretrained({str(tmp_path)!r})"
    assert run(script).returncode == 0
    load = f"""
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
assert model.config._attn_implementation == "ssa"
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, ssa={{"learn_b": False}})
assert not model.model.layers[0].self_attn.ssa_norm.config.learn_b
"""
    done = run(load)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("variable", ["SSA_HF_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"])
def test_it_can_be_turned_off_and_then_an_import_does_it(variable):
    done = run(f"import torch{BUILD}", **{variable: "0"})
    assert done.returncode != 0
    assert 'attn_implementation="ssa"' in done.stderr.splitlines()[-1]
    done = run(f"import torch, ssa_hf{BUILD}", **{variable: "0"})
    assert done.returncode == 0, done.stderr


def test_torch_alone_imports_nothing_else():
    """The cost of the hook: one small module (0.4 ms where this was written), and nothing that it imports."""
    modules = "import torch, sys; print(*sys.modules, sep=',')"
    with_it, without = (set(run(modules, SSA_HF_AUTOLOAD=value).stdout.strip().split(",")) for value in ("1", "0"))
    assert with_it == without
    assert "ssa_hf_autoload" in with_it
    assert not {"ssa_hf", "transformers"} & with_it
    plain = set(run(modules, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout.strip().split(","))
    found = {name for name in with_it - plain if not name.startswith(("importlib", "email"))}  # entry_points() itself
    assert "ssa_hf_autoload" in found
    assert not {"ssa_hf", "transformers", "numpy"} & found


def test_it_works_beside_another_such_hook():
    """Another package hooks the same module, before or after this one, by asking the finders below it."""
    other = """
import importlib.util, sys
class Other:
    done = False
    ran = []
    def find_spec(self, name, path=None, target=None):
        if name != "transformers.modeling_utils" or self.done:
            return None
        self.done = True
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            self.ran.append(name)
        spec.loader.exec_module = exec_module
        return spec
"""
    for install in ("sys.meta_path.insert(0, Other())\nimport torch", "import torch\nsys.meta_path.insert(0, Other())"):
        done = run(f"{other}{install}{BUILD}assert Other.ran")
        assert done.returncode == 0, done.stderr


def test_a_broken_install_leaves_softmax_models_alone():
    script = """
import sys
sys.modules["ssa_hf"] = None  # as if its import failed
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
sizes = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1, vocab_size=50)
AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
"""
    done = run(script)
    assert done.returncode == 0, done.stderr
    assert "ssa_hf could not be imported" in done.stderr
    assert "SSA_HF_AUTOLOAD=0" in done.stderr
