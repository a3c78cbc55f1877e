//! Compiles the kernels, where there is a compiler.
fn main() {
    kernel_build::compile("fp8_kv", &["cuda/fp8_kv.cu"]);
}
