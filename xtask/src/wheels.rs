//! Tools that come as Python wheels, unpacked under cargo's build folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, Command};

use anyhow::{Context, Result, bail};

use crate::{command, paths};

/// The folder `target/<name>` with the packages in it, installed by pip if it is not there yet.
///
/// pip writes into a folder of this process beside it, which takes its name only when pip is done and `check` is content: an
/// interrupted installation leaves nothing that looks whole, and the next one clears its remains away.
pub fn install(name: &str, packages: &[&str], check: fn(&Path) -> Result<()>) -> Result<PathBuf> {
    install_in(&paths::target(), name, check, &|dir| {
        eprintln!("installing {} into {}", packages.join(", "), paths::shown(&paths::target().join(name)));
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]);
        pip.args(["--only-binary=:all:", "--target"]).arg(dir).args(packages);
        // It warns root of what a folder of our own rules out.
        command::run(pip.env("PIP_ROOT_USER_ACTION", "ignore"))
    })
}

/// The folder that [`install`] made, if it did.
pub fn installed(name: &str) -> Option<PathBuf> {
    let dir = paths::target().join(name);
    dir.is_dir().then_some(dir)
}

fn install_in(
    parent: &Path,
    name: &str,
    check: fn(&Path) -> Result<()>,
    fill: &dyn Fn(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let whole = parent.join(name);
    if whole.is_dir() {
        return Ok(whole);
    }
    clear_remains(parent, name)?;
    let partial = parent.join(format!("{name}.partial-{}", process::id()));
    fs::create_dir_all(&partial).with_context(|| format!("cannot create {}", partial.display()))?;
    let made = fill(&partial).and_then(|()| check(&partial)).and_then(|()| {
        match fs::rename(&partial, &whole) {
            // Another process was faster, with the same packages.
            Err(_) if whole.is_dir() => Ok(()),
            renamed => renamed.with_context(|| format!("cannot create {}", whole.display())),
        }
    });
    if partial.exists() {
        fs::remove_dir_all(&partial).with_context(|| format!("cannot remove {}", partial.display()))?;
    }
    made.map(|()| whole)
}

/// Removes what installations left that ended before they were done.
fn clear_remains(parent: &Path, name: &str) -> Result<()> {
    let Ok(entries) = fs::read_dir(parent) else { return Ok(()) };
    for entry in entries {
        let path = entry?.path();
        let file = paths::name(&path);
        let owner = file.strip_prefix(name).and_then(|rest| rest.strip_prefix(".partial-"));
        if owner.is_some_and(|id| !Path::new("/proc").join(id).exists()) {
            fs::remove_dir_all(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    Ok(())
}

/// That a file was installed.
pub fn has(dir: &Path, file: &str) -> Result<()> {
    if !dir.join(file).is_file() {
        bail!("the packages hold no {file}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(dir: &Path) -> Result<()> {
        Ok(fs::write(dir.join("tool"), "")?)
    }

    fn names(dir: &Path) -> Vec<String> {
        fs::read_dir(dir).unwrap().map(|entry| paths::name(&entry.unwrap().path())).collect()
    }

    #[test]
    fn installs_once() {
        let dir = tempfile::tempdir().unwrap();
        let parent = dir.path().join("target");
        let made = install_in(&parent, "kit", |dir| has(dir, "tool"), &fill).unwrap();
        assert!(made.join("tool").is_file());
        let again = install_in(&parent, "kit", |_| bail!("checked again"), &|_| bail!("filled again"));
        assert_eq!(again.unwrap(), made);
        assert_eq!(names(&parent), ["kit"]);
    }

    #[test]
    fn a_failure_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        assert!(install_in(dir.path(), "kit", |_| Ok(()), &|_| bail!("no network")).is_err());
        let error = install_in(dir.path(), "kit", |dir| has(dir, "bin/nvcc"), &fill).unwrap_err();
        assert_eq!(error.to_string(), "the packages hold no bin/nvcc");
        assert!(names(dir.path()).is_empty());
    }

    #[test]
    fn remains_of_a_killed_installation_are_cleared() {
        let dir = tempfile::tempdir().unwrap();
        // Above the largest process id that Linux gives.
        fs::create_dir(dir.path().join("kit.partial-4194305")).unwrap();
        let running = format!("kit.partial-{}", std::os::unix::process::parent_id());
        fs::create_dir(dir.path().join(&running)).unwrap();
        install_in(dir.path(), "kit", |_| Ok(()), &fill).unwrap();
        let mut left = names(dir.path());
        left.sort();
        assert_eq!(left, ["kit".to_string(), running]);
    }
}
