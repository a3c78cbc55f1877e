//! Compiles the kernels, where there is a compiler.
fn main() {
    kernel_build::compile("nvfp4_balance", &["cuda/nvfp4_balance.cu"]);
}
