use std::ffi::OsStr;
use std::path::PathBuf;

use crate::arch::{Arch, parse_archs};
use crate::{Env, nvcc};

/// Hopper, where the kernels are measured.
const DEFAULT_ARCHS: &str = "90a";

/// What a build does.
#[derive(Debug, PartialEq)]
pub(crate) enum Plan {
    /// Compile, with this nvcc for these architectures.
    Compile { nvcc: PathBuf, archs: Vec<Arch> },
    /// Leave the kernels out, for this reason.
    Skip { why_not: String, warn: bool },
}

/// Decides from the environment alone.
pub(crate) fn plan(env: Env<'_>) -> Result<Plan, String> {
    plan_with(env, nvcc::SYSTEM)
}

fn plan_with(env: Env<'_>, system: &str) -> Result<Plan, String> {
    if env("DOCS_RS").is_some() {
        let why_not = "a documentation build compiles no kernels (DOCS_RS is set)".to_string();
        return Ok(Plan::Skip { why_not, warn: false });
    }
    let archs = match env("STRUCTURES_CUDA_ARCHS") {
        Some(list) => {
            parse_archs(&list.to_string_lossy()).map_err(|e| format!("STRUCTURES_CUDA_ARCHS: {e}"))?
        }
        None => parse_archs(DEFAULT_ARCHS)?,
    };
    if let Some(nvcc) = nvcc::find_with(env, system)? {
        return Ok(Plan::Compile { nvcc, archs });
    }
    let why_not =
        "no nvcc was found when the crate was built (looked at NVCC, CUDA_HOME, CUDA_PATH, PATH and \
                   /usr/local/cuda)"
            .to_string();
    if env("STRUCTURES_REQUIRE_NVCC").as_deref() == Some(OsStr::new("1")) {
        return Err(format!("{why_not}, and STRUCTURES_REQUIRE_NVCC is 1"));
    }
    Ok(Plan::Skip { why_not, warn: true })
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::fs;

    use super::*;

    fn decide(vars: &[(&str, &str)]) -> Result<Plan, String> {
        let env = |key: &str| vars.iter().find(|(k, _)| *k == key).map(|(_, v)| OsString::from(v));
        plan_with(&env, "/nonexistent/nvcc")
    }

    #[test]
    fn without_nvcc_the_kernels_are_left_out_unless_required() {
        let Plan::Skip { why_not, warn } = decide(&[("STRUCTURES_REQUIRE_NVCC", "0")]).unwrap() else {
            panic!("compiled without nvcc")
        };
        assert!(warn && why_not.starts_with("no nvcc was found"), "{why_not}");
        let reason = decide(&[("STRUCTURES_REQUIRE_NVCC", "1")]).unwrap_err();
        assert!(reason.contains("STRUCTURES_REQUIRE_NVCC is 1"), "{reason}");
    }

    #[test]
    fn with_nvcc_the_list_is_compiled() {
        let dir = tempfile::tempdir().unwrap();
        let nvcc = dir.path().join("nvcc");
        fs::write(&nvcc, "").unwrap();
        let nvcc = nvcc.to_str().unwrap();
        let plan = |archs| decide(&[("NVCC", nvcc), ("STRUCTURES_CUDA_ARCHS", archs)]);
        let archs = parse_archs("80,120a").unwrap();
        assert_eq!(plan("80,120a").unwrap(), Plan::Compile { nvcc: nvcc.into(), archs });
        assert!(plan("80,x").unwrap_err().starts_with("STRUCTURES_CUDA_ARCHS: \"x\""));
        let default = decide(&[("NVCC", nvcc)]).unwrap();
        assert_eq!(
            default,
            Plan::Compile { nvcc: nvcc.into(), archs: vec![Arch { cc: 90, specific: true }] }
        );
    }

    #[test]
    fn documentation_builds_look_no_further() {
        let plan =
            decide(&[("DOCS_RS", "1"), ("NVCC", "/nonexistent/nvcc"), ("STRUCTURES_REQUIRE_NVCC", "1")]);
        assert!(matches!(plan, Ok(Plan::Skip { warn: false, .. })), "{plan:?}");
    }
}
