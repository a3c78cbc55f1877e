//! Implementation crates by name: a crate that no code names is dropped by the linker, and its registration with it.

#[cfg(feature = "decode-loop-fp8-kv")]
use decode_loop_fp8_kv as _;
#[cfg(feature = "decode-loop-whole-step")]
use decode_loop_whole_step as _;
#[cfg(feature = "linear-proj-nvfp4-balance")]
use linear_proj_nvfp4_balance as _;
#[cfg(feature = "linear-proj-nvfp4-dynamic")]
use linear_proj_nvfp4_dynamic as _;
#[cfg(feature = "linear-proj-w8a16-static")]
use linear_proj_w8a16_static as _;
