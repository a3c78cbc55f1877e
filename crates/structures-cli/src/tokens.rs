//! The text that a command reads: whole windows of a file of token ids.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};

use crate::args::Tokens;

/// The tokens of as many whole windows as `--skip` and `--limit` leave, and the one that the last position predicts.
pub fn read(args: &Tokens) -> Result<Vec<u32>> {
    if args.window == 0 {
        bail!("--window is 0; it must be at least 1");
    }
    let mut tokens = read_file(&args.tokens)?;
    let total = tokens.len();
    tokens.drain(..args.skip.min(total));
    let predictable = tokens.len().saturating_sub(1).min(args.limit.unwrap_or(usize::MAX));
    let windows = predictable / args.window;
    if windows == 0 {
        bail!(
            "{}: {total} tokens, of which {predictable} can be predicted, are less than one window of {}",
            args.tokens.display(),
            args.window
        );
    }
    tokens.truncate(windows * args.window + 1);
    Ok(tokens)
}

/// A file of 16-bit little-endian ids.
fn read_file(path: &Path) -> Result<Vec<u32>> {
    let bytes = fs::read(path).with_context(|| path.display().to_string())?;
    let (ids, rest) = bytes.as_chunks::<2>();
    if !rest.is_empty() {
        bail!("{}: {} bytes is an odd length; token ids are 16-bit", path.display(), bytes.len());
    }
    Ok(ids.iter().map(|&id| u32::from(u16::from_le_bytes(id))).collect())
}

/// A progress bar over tokens.
pub fn bar(tokens: usize, what: &'static str) -> Result<ProgressBar> {
    let bar = ProgressBar::new(tokens as u64).with_message(what);
    bar.set_style(ProgressStyle::with_template(
        "{msg:9} [{bar:40}] {pos}/{len} tokens, {per_sec}, {eta} left",
    )?);
    Ok(bar)
}
