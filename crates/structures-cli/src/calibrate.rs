use std::io::{self, Write};

use anyhow::Result;
use qwen3_5::Model;

use crate::args::Calibrate;
use crate::tokens;

/// Records what each input channel of each seat reaches, and writes it to a file.
pub fn run(args: &Calibrate) -> Result<()> {
    let text = tokens::read(&args.text)?;
    let mut model = Model::load(&args.model)?;
    let bar = tokens::bar(text.len() - 1, "calibrate")?;
    let calibration =
        model.calibrate(&text[..text.len() - 1], args.text.window, args.percentile, &mut |done| {
            bar.set_position(done as u64)
        })?;
    bar.finish_and_clear();
    calibration.save(&args.out)?;
    writeln!(
        io::stdout().lock(),
        "{} seats over {} windows of {} tokens, percentile {}: {}",
        calibration.seats(),
        calibration.samples,
        calibration.window,
        calibration.percentile,
        args.out.display()
    )?;
    Ok(())
}
