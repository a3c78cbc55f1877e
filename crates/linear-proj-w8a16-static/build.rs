//! Compiles the kernels, where there is a compiler.
fn main() {
    kernel_build::compile("w8a16_static", &["cuda/w8a16_static.cu"]);
}
