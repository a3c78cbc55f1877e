//! The conformance binary: what every implementation must do, on every arm that this machine has.
//!
//! Tests of the GPU arm are skipped, and say so, where there is no CUDA device; with `STRUCTURES_REQUIRE_GPU=1` they fail
//! instead. The checkpoints are looked for in `$STRUCTURES_ASSETS`, else in `assets/` of the checkout.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test that cannot go on fails")]

mod adoption;
mod arm;
#[cfg(kernels_built)]
mod attention;
#[cfg(kernels_built)]
mod attention_prompt;
mod balance;
#[cfg(kernels_built)]
mod bf16_linear;
#[cfg(kernels_built)]
mod cuda_model;
mod decode_loop;
mod faults;
#[cfg(kernels_built)]
mod gated_delta;
#[cfg(kernels_built)]
mod gated_rows;
mod gates;
mod graph;
#[cfg(kernels_built)]
mod host_experts;
#[cfg(kernels_built)]
mod host_rows;
mod perplexity;
mod prefill;
mod random;
mod registry;
mod seats;
mod table;
mod together;

use libtest_mimic::{Arguments, Trial};

fn main() {
    let arguments = Arguments::from_args();
    let trials: Vec<Trial> = [
        registry::trials(),
        #[cfg(kernels_built)]
        attention::trials(),
        #[cfg(kernels_built)]
        attention_prompt::trials(),
        #[cfg(kernels_built)]
        bf16_linear::trials(),
        gates::trials(),
        adoption::trials(),
        balance::trials(),
        seats::trials(),
        graph::trials(),
        together::trials(),
        faults::trials(),
        #[cfg(kernels_built)]
        gated_delta::trials(),
        #[cfg(kernels_built)]
        gated_rows::trials(),
        prefill::trials(),
        perplexity::trials(),
        decode_loop::trials(),
        #[cfg(kernels_built)]
        cuda_model::trials(),
        #[cfg(kernels_built)]
        host_rows::trials(),
        #[cfg(kernels_built)]
        host_experts::trials(),
    ]
    .into_iter()
    .flatten()
    .collect();
    libtest_mimic::run(&arguments, trials).exit();
}
