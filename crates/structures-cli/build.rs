//! Says whether there is a host on a GPU.
fn main() {
    kernel_build::declare();
}
