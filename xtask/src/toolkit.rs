//! `cargo xtask toolkit`: the CUDA compiler, found or installed.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};

use crate::{command, wheels};

/// NVIDIA's compiler as wheels: nvcc, the headers it includes, the runtime to link, and the device-code optimiser.
const PACKAGES: [&str; 5] = [
    "nvidia-cuda-nvcc==13.0.*",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-cuda-runtime==13.0.*",
    "nvidia-cuda-cccl==13.0.*",
    "nvidia-nvvm==13.0.*",
];

/// The folder that they are installed to, and nvcc in it.
const FOLDER: &str = "cuda-toolkit";
const NVCC: &str = "nvidia/cu13/bin/nvcc";

/// The oldest release that knows sm_120a.
const OLDEST: (u32, u32) = (12, 8);

pub fn run() -> Result<()> {
    println!("{}", nvcc()?.display());
    Ok(())
}

/// nvcc: the machine's own if it has one that is new enough, otherwise installed into target/.
pub fn nvcc() -> Result<PathBuf> {
    match find()? {
        Some(nvcc) => Ok(nvcc),
        None => {
            eprintln!("no nvcc of release {}.{} or later on this machine", OLDEST.0, OLDEST.1);
            let dir = wheels::install(FOLDER, &PACKAGES, |dir| release(&dir.join(NVCC)).map(|_| ()))
                .context("cannot install nvcc")?;
            Ok(dir.join(NVCC))
        }
    }
}

/// The same, for tasks that go on without: says so when it can be neither found nor installed.
pub fn nvcc_if_possible() -> Result<Option<PathBuf>> {
    // A wrong NVCC is the user's to put right.
    let found = find()?;
    if found.is_some() {
        return Ok(found);
    }
    Ok(nvcc()
        .inspect_err(|error| {
            eprintln!("notice: {error:#}");
            eprintln!("notice: going on without CUDA kernels; CPU arms are complete");
        })
        .ok())
}

/// nvcc if it is on this machine, or was installed before.
pub fn find() -> Result<Option<PathBuf>> {
    let own = kernel_build::find_nvcc(&|key| env::var_os(key)).map_err(|reason| anyhow!(reason))?;
    if let Some(nvcc) = own {
        // One that was asked for by name is taken as it is.
        let asked = env::var_os("NVCC").is_some_and(|value| !value.is_empty());
        let release = release(&nvcc)?;
        if asked || release >= OLDEST {
            return Ok(Some(nvcc));
        }
        eprintln!("passing over {}: release {}.{} is too old", nvcc.display(), release.0, release.1);
    }
    Ok(wheels::installed(FOLDER).map(|dir| dir.join(NVCC)))
}

/// Asks nvcc for its release.
fn release(nvcc: &Path) -> Result<(u32, u32)> {
    let said = command::output(Command::new(nvcc).arg("--version"))?;
    match parse_release(&said) {
        Some(release) => Ok(release),
        None => bail!("{} names no release: {said}", nvcc.display()),
    }
}

/// 13.0 in "Cuda compilation tools, release 13.0, V13.0.88".
fn parse_release(said: &str) -> Option<(u32, u32)> {
    let (_, rest) = said.split_once("release ")?;
    let (release, _) = rest.split_once(',')?;
    let (major, minor) = release.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases() {
        let said = "nvcc: NVIDIA (R) Cuda compiler driver\nCopyright (c) 2005-2025 NVIDIA Corporation\nBuilt on \
                    Wed_Aug_20_01:58:59_PM_PDT_2025\nCuda compilation tools, release 13.0, V13.0.88\nBuild \
                    cuda_13.0.r13.0/compiler.36424714_0\n";
        assert_eq!(parse_release(said), Some((13, 0)));
        assert_eq!(parse_release("Cuda compilation tools, release 9.2, V9.2.88"), Some((9, 2)));
        assert_eq!(parse_release("nvcc fatal: something"), None);
        assert!((9, 2) < OLDEST && (12, 10) > OLDEST);
    }
}
