//! Says whether there are kernels to hold.
fn main() {
    kernel_build::declare();
}
