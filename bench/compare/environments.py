"""The environment of each rival's library: what it pins, whether it is there, and how it is made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

INSTALL_S = 1200.0
_VERSIONS = (
    "import json, importlib.metadata as m; "
    "print(json.dumps({d.metadata['Name'].lower().replace('_', '-'): d.version for d in m.distributions()}))"
)


@dataclass(frozen=True)
class Environment:
    """A virtual environment of one name. `alone` packages come without what they ask for."""

    name: str
    pins: tuple[str, ...]
    alone: tuple[str, ...] = ()

    @property
    def subject(self) -> str:
        """The library that is compared, with its version; the rest is what it needs."""
        return (*self.alone, *self.pins)[0]


_NUMPY = "numpy==2.4.6"
# LMCache asks for CUDA packages that its servers run without, so it comes alone and with the rest of its list.
_LMCACHE_NEEDS = (
    "torch==2.13.0",
    "numpy==2.2.6",
    "aiofile==3.12.3",
    "aiofiles==25.1.0",
    "aiohttp==3.14.5",
    "awscrt==0.38.1",
    "blake3==1.0.11",
    "cachetools==8.0.2",
    "cryptography==50.0.2",
    "fastapi==0.141.1",
    "grpcio==1.85.3",
    "httptools==0.9.0",
    "httpx==0.28.1",
    "huggingface-hub==2.4.0",
    "msgspec==0.23.0",
    "numba==0.68.1",
    "nvtx==0.2.17",
    "opentelemetry-api==1.40.0",
    "opentelemetry-exporter-otlp==1.40.0",
    "opentelemetry-sdk==1.40.0",
    "prometheus-client==0.24.1",
    "protobuf==6.33.6",
    "psutil==7.2.2",
    "py-cpuinfo==9.0.0",
    "pyyaml==6.0.4",
    "pyzmq==27.3.0",
    "redis==8.1.0",
    "safetensors==0.8.0",
    "sortedcontainers==2.4.0",
    "transformers==5.24.0",
    "uvicorn==0.54.0",
    "xxhash==4.1.0",
)
# The library that is compared stands first.
ENVIRONMENTS = {
    made.name: made
    for made in (
        Environment("redis", ("redis==8.1.0", _NUMPY)),
        Environment("redis-hiredis", ("redis==8.1.0", "hiredis==3.5.0", _NUMPY)),
        Environment("memcached", ("pymemcache==4.0.0", _NUMPY)),
        Environment("mooncake", ("mooncake-transfer-engine-non-cuda==0.3.13.post1", _NUMPY)),
        Environment("openlake", ("openlake-vllm==0.8.1", _NUMPY)),
        Environment("redhare", ("redhare==0.6.0", _NUMPY)),
        Environment("lmcache", _LMCACHE_NEEDS, alone=("lmcache==0.5.6",)),
    )
}


def python_of(folder: Path, environment: Environment) -> Path:
    """The interpreter of an environment under this folder."""
    return folder / environment.name / "bin" / "python"


def missing(folder: Path, environment: Environment) -> str:
    """Why the environment cannot be used; empty if it can."""
    python = python_of(folder, environment)
    if not python.exists():
        return f"no environment {python.parents[1]} (--install makes it)"
    done = subprocess.run([str(python), "-c", _VERSIONS], capture_output=True, text=True)
    if done.returncode:
        return f"{python} does not run: {done.stderr.strip()[-200:]}"
    differing = unmet([*environment.pins, *environment.alone], json.loads(done.stdout))
    return (
        f"{python.parents[1]} has other versions: {', '.join(differing)} (--install corrects it)" if differing else ""
    )


def unmet(pins: Sequence[str], found: Mapping[str, str]) -> list[str]:
    """The pins that the versions found do not meet; a build tag such as +cpu does not count."""
    wanted = [pin.split("==") for pin in pins]
    return [f"{name} {v}" for name, v in wanted if found.get(name, "").partition("+")[0] != v]


def install(folder: Path, environment: Environment) -> str:
    """Makes the environment, or brings it to its pins. Returns why that failed; empty if it did not."""
    python = python_of(folder, environment)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    steps = [] if python.exists() else [[sys.executable, "-m", "venv", str(python.parents[1])]]
    steps.append([*pip, *environment.pins])
    if environment.alone:
        steps.append([*pip, "--no-deps", *environment.alone])
    return next((fault for fault in map(_run, steps) if fault), "")


def install_system(packages: Sequence[str]) -> str:
    """Installs packages of the distribution where that is Debian's and we may. Returns why not; empty if it did."""
    if shutil.which("apt-get") is None:
        return "no apt-get here"
    if os.geteuid() != 0:
        return f"needs root: apt-get install {' '.join(packages)}"
    return _run(["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages])


def _run(command: Sequence[str]) -> str:
    # RUNLEVEL=1: a package that brings a server does not start it.
    env = {**os.environ, "RUNLEVEL": "1", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, env=env)
    except subprocess.TimeoutExpired:
        return f"{' '.join(command[:3])} took over {INSTALL_S:.0f} s"
    last = done.stderr.strip().splitlines()[-1:] or [""]
    return f"{' '.join(command[:3])} failed: {last[0][-300:]}" if done.returncode else ""
