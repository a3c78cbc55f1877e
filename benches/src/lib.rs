//! How everything here is measured.
//!
//! On a GPU (module `gpu`, where kernels are built): the floor of a call is the fewest bytes it must read and write, over the
//! read bandwidth that our own streaming kernel reaches in the same run. Calls rotate among copies of their weights so that
//! nothing comes from L2, many calls are replayed as one graph, and the median of twenty replays counts: [`protocol`] has the
//! numbers, and `peers/` follows them with other libraries. [`results`] are one JSON file a GPU; [`mod@table`], [`plot`] and
//! [`readme`] show it.
//!
//! On the CPU: criterion, for the trend of the CPU arms alone.
//!
//! ```
//! use benches::results::Row;
//!
//! let row = Row::new("linear_proj/w8a16_static", "project", 25.0, 89.6e6, 4650.0);
//! assert!((row.floor_us - 19.27).abs() < 0.01 && (row.ratio - 0.771).abs() < 0.001);
//! ```

#[cfg(kernels_built)]
mod cuda;
#[cfg(kernels_built)]
mod ffi;
#[cfg(kernels_built)]
pub mod gpu;
pub mod peers;
pub mod plot;
pub mod protocol;
pub mod random;
pub mod readme;
pub mod report;
pub mod results;
pub mod table;

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
