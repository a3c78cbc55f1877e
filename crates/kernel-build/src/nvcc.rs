use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Env;
use crate::arch::Arch;
use crate::workspace::Workspace;

/// Where CUDA's own installer puts it.
pub(crate) const SYSTEM: &str = "/usr/local/cuda/bin/nvcc";

/// Finds nvcc: `NVCC` (a path, or a name in `PATH`), then `bin/nvcc` under `CUDA_HOME` and `CUDA_PATH`, then `PATH`, then
/// `/usr/local/cuda`. `None` when there is none.
///
/// # Errors
///
/// When `NVCC` is set and names no file: what was asked for by name is not replaced by something else.
pub fn find_nvcc(env: Env<'_>) -> Result<Option<PathBuf>, String> {
    find_with(env, SYSTEM)
}

pub(crate) fn find_with(env: Env<'_>, system: &str) -> Result<Option<PathBuf>, String> {
    if let Some(asked) = env("NVCC").filter(|value| !value.is_empty()) {
        let path = Path::new(&asked);
        let found = if path.components().count() > 1 { file(path.into()) } else { in_path(env, path) };
        return found.map(Some).ok_or_else(|| format!("NVCC is {}, which is no file", path.display()));
    }
    let home = |key| env(key).and_then(|home| file(Path::new(&home).join("bin/nvcc")));
    Ok(home("CUDA_HOME")
        .or_else(|| home("CUDA_PATH"))
        .or_else(|| in_path(env, Path::new("nvcc")))
        .or_else(|| file(system.into())))
}

/// The path as it was given, when it is a file and absolute: a relative one would depend on who looks.
fn file(path: PathBuf) -> Option<PathBuf> {
    (path.is_absolute() && path.is_file()).then_some(path)
}

fn in_path(env: Env<'_>, name: &Path) -> Option<PathBuf> {
    env::split_paths(&env("PATH")?).find_map(|dir| file(dir.join(name)))
}

/// Compiles every source for every architecture, and has cargo link the result with the CUDA runtime, statically.
pub(crate) fn compile(
    nvcc: &Path,
    archs: &[Arch],
    workspace: &Workspace,
    name: &str,
    sources: &[PathBuf],
    out_dir: &Path,
    env: Env<'_>,
) -> Result<(), String> {
    // cc chooses the host compiler and the archiver. It does not run nvcc: it would take it from NVCC alone, compile for
    // debugging when cargo does, and make relocatable device code, which costs the kernels inlining.
    let mut archive = cc::Build::new();
    archive.cpp(true);
    let host = archive.try_get_compiler().map_err(|e| e.to_string())?;
    for (i, source) in sources.iter().enumerate() {
        let object = out_dir.join(format!("{name}-{i}.o"));
        let mut command = Command::new(nvcc);
        command
            // Line numbers for profilers; compressed they cost next to nothing, and ten times the code otherwise.
            .args(["-lineinfo", "--compress-mode=size"])
            .args(["-c", "-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden"])
            .args(archs.iter().map(|arch| format!("-gencode=arch=compute_{arch},code=sm_{arch}")))
            // Architectures of one file at the same time.
            .arg(format!("--threads={}", env::var("NUM_JOBS").unwrap_or_else(|_| "1".into())))
            .arg("-ccbin")
            .arg(host.path());
        for dir in workspace.cuda_dirs() {
            command.arg("-I").arg(dir);
        }
        command.arg("-o").arg(&object).arg(source);
        run(&mut command)?;
        archive.object(object);
    }
    // nvcc reads these by itself.
    for key in ["NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"] {
        env(key);
    }
    archive.try_compile(&format!("{name}_kernels")).map_err(|e| e.to_string())?;
    for dir in library_dirs(nvcc) {
        println!("cargo::rustc-link-search=native={}", dir.display());
    }
    // Not bundled: the runtime is linked once into a binary, however many crates with kernels it holds.
    println!("cargo::rustc-link-lib=static:-bundle=cudart_static");
    Ok(())
}

/// The folders of the toolkit that may hold its libraries and exist: `lib64` in CUDA's installer, `lib` in its wheels.
fn library_dirs(nvcc: &Path) -> Vec<PathBuf> {
    // Distributions install nvcc as a link into the toolkit.
    let real = nvcc.canonicalize().unwrap_or_else(|_| nvcc.to_path_buf());
    let Some(toolkit) = real.parent().and_then(Path::parent) else { return Vec::new() };
    ["lib64", "lib"].iter().map(|lib| toolkit.join(lib)).filter(|dir| dir.is_dir()).collect()
}

/// Runs nvcc. What it says on success is a warning.
fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|e| format!("cannot run {command:?}: {e}"))?;
    let said =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    if !output.status.success() {
        return Err(format!("{command:?}\nfailed ({}):\n{said}", output.status));
    }
    for line in said.lines().filter(|line| !line.trim().is_empty()) {
        println!("cargo::warning={line}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::fs;

    use super::*;

    /// A folder with `bin/nvcc` in each of the named subfolders.
    fn toolkits(names: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for name in names {
            let bin = dir.path().join(name).join("bin");
            fs::create_dir_all(&bin).unwrap();
            fs::write(bin.join("nvcc"), "").unwrap();
        }
        dir
    }

    #[test]
    fn the_order_is_nvcc_home_path_then_the_system() {
        let dir = toolkits(&["asked", "home", "path", "search", "system"]);
        let at = |name: &str| dir.path().join(name);
        let mut vars: Vec<(&str, OsString)> = vec![
            ("NVCC", at("asked/bin/nvcc").into()),
            ("CUDA_HOME", at("home").into()),
            ("CUDA_PATH", at("path").into()),
            ("PATH", env::join_paths([at("empty"), at("search/bin")]).unwrap()),
        ];
        let system = at("system/bin/nvcc");
        for expected in ["asked", "home", "path", "search", "system"] {
            let env = |key: &str| vars.iter().find(|(k, _)| *k == key).map(|(_, v)| v.clone());
            let found = find_with(&env, system.to_str().unwrap()).unwrap().unwrap();
            assert_eq!(found, at(expected).join("bin/nvcc"));
            if !vars.is_empty() {
                vars.remove(0);
            }
        }
        assert_eq!(find_with(&|_| None, "/nonexistent/nvcc"), Ok(None));
    }

    #[test]
    fn a_home_without_nvcc_is_passed_over() {
        let dir = toolkits(&["path"]);
        let env = |key: &str| match key {
            "CUDA_HOME" => Some(dir.path().join("empty").into()),
            "CUDA_PATH" => Some(dir.path().join("path").into()),
            _ => None,
        };
        assert_eq!(find_with(&env, "/nonexistent/nvcc"), Ok(Some(dir.path().join("path/bin/nvcc"))));
    }

    #[test]
    fn nvcc_is_a_path_or_a_name_and_never_replaced() {
        let dir = toolkits(&["search"]);
        let find = |nvcc: &str| {
            let env = |key: &str| match key {
                "NVCC" => Some(nvcc.into()),
                "PATH" => Some(dir.path().join("search/bin").into()),
                _ => None,
            };
            find_with(&env, "/nonexistent/nvcc")
        };
        let there = Ok(Some(dir.path().join("search/bin/nvcc")));
        assert_eq!(find("nvcc"), there);
        assert_eq!(find(""), there);
        assert_eq!(find("/nonexistent/nvcc").unwrap_err(), "NVCC is /nonexistent/nvcc, which is no file");
        assert_eq!(find("nvcc-99").unwrap_err(), "NVCC is nvcc-99, which is no file");
    }

    #[test]
    fn libraries_are_beside_the_real_nvcc() {
        let dir = toolkits(&["cuda"]);
        let root = dir.path().canonicalize().unwrap();
        fs::create_dir_all(root.join("cuda/lib")).unwrap();
        assert_eq!(library_dirs(&root.join("cuda/bin/nvcc")), [root.join("cuda/lib")]);
        fs::create_dir_all(root.join("cuda/lib64")).unwrap();
        std::os::unix::fs::symlink(root.join("cuda/bin/nvcc"), root.join("nvcc")).unwrap();
        assert_eq!(library_dirs(&root.join("nvcc")), [root.join("cuda/lib64"), root.join("cuda/lib")]);
    }
}
