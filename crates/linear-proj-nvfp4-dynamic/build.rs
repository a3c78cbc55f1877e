//! Compiles the kernels, where there is a compiler.
fn main() {
    kernel_build::compile("nvfp4_dynamic", &["cuda/nvfp4_dynamic.cu"]);
}
