//! The conformance binary: what every implementation must do, on every arm that this machine has.
//!
//! Tests of the GPU arm are skipped, and say so, where there is no CUDA device; with `STRUCTURES_REQUIRE_GPU=1` they fail
//! instead. The checkpoints are looked for in `$STRUCTURES_ASSETS`, else in `assets/` of the checkout.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test that cannot go on fails")]

mod adoption;
mod arm;
mod balance;
#[cfg(kernels_built)]
mod bf16_linear;
mod faults;
mod gates;
mod graph;
mod perplexity;
mod prefill;
mod random;
mod registry;
mod seats;

use libtest_mimic::{Arguments, Trial};

fn main() {
    let arguments = Arguments::from_args();
    let trials: Vec<Trial> = [
        registry::trials(),
        #[cfg(kernels_built)]
        bf16_linear::trials(),
        gates::trials(),
        adoption::trials(),
        balance::trials(),
        seats::trials(),
        graph::trials(),
        faults::trials(),
        prefill::trials(),
        perplexity::trials(),
    ]
    .into_iter()
    .flatten()
    .collect();
    libtest_mimic::run(&arguments, trials).exit();
}
