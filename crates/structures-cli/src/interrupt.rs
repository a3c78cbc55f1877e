//! Ctrl-C: the first ends the text, the second the program.

use std::ops::ControlFlow;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use signal_hook::consts::SIGINT;
use signal_hook::flag;

/// The exit code of a program that Ctrl-C ended.
const INTERRUPTED: u8 = 130;

/// Whether there was one.
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// From now on Ctrl-C does not end the program at once.
    pub fn watch() -> Result<Self> {
        let seen = Arc::new(AtomicBool::new(false));
        // In this order, so that the first one only says that it was there.
        flag::register_conditional_shutdown(SIGINT, INTERRUPTED.into(), Arc::clone(&seen))?;
        flag::register(SIGINT, Arc::clone(&seen))?;
        Ok(Interrupt(seen))
    }

    /// What a callback answers.
    pub fn flow(&self) -> ControlFlow<()> {
        if self.0.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// How the program ends.
    pub fn exit_code(&self) -> ExitCode {
        if self.flow().is_break() { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS }
    }
}
