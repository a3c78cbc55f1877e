use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};

/// Verified, composable acceleration for LLM decode.
#[derive(Parser)]
#[command(version)]
pub struct Args {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// List the linked implementations: what each takes, and what it was built for or why it was not
    List(List),
    /// Say what would serve each seat of a model: bound, dispatched, kept or refused, each with its reason
    Explain(Explain),
    /// Continue a prompt, streaming the text as it comes
    Generate(Generate),
    /// Measure a decode step of a large host with random weights, which needs no checkpoint, on a GPU
    Synth(Synth),
    /// Record the largest magnitude of every input channel on a text, for variants that need it
    Calibrate(Calibrate),
    /// Measure perplexity, beside the host's own when something is bound
    Eval(Eval),
}

#[derive(ClapArgs)]
pub struct List {
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
}

/// The model and what to bind into it.
#[derive(ClapArgs)]
pub struct Model {
    /// Folder of a Hugging Face checkpoint: config.json, *.safetensors, tokenizer.json
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Where bound implementations run, and with `generate` the whole model
    #[arg(long, value_enum, default_value_t = DeviceArg::Cpu)]
    pub device: DeviceArg,
    #[command(flatten)]
    pub bind: Bind,
}

/// What to bind.
#[derive(ClapArgs)]
pub struct Bind {
    /// Put an implementation into seats: a glob over seat paths, `=`, and a variant or `host`; the last rule that selects a seat counts
    #[arg(long, value_name = "PATTERN=VARIANT")]
    pub bind: Vec<String>,
    /// Scales of NVFP4 weights and rows
    #[arg(long, value_enum, default_value_t = ScalesArg::TwoLevel)]
    pub nvfp4_scales: ScalesArg,
    /// What `structures calibrate` wrote, for variants that need it
    #[arg(long, value_name = "FILE")]
    pub calibration: Option<PathBuf>,
    /// Refuse calls that are not of the bound form instead of falling back to the host
    #[arg(long)]
    pub strict: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeviceArg {
    /// The CPU arms
    Cpu,
    /// The first CUDA device
    Cuda,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ScalesArg {
    /// A global scale in FP32 above the block scales
    TwoLevel,
    /// Block scales alone
    SingleLevel,
}

#[derive(ClapArgs)]
pub struct Explain {
    #[command(flatten)]
    pub model: Model,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
}

#[derive(ClapArgs)]
pub struct Generate {
    #[command(flatten)]
    pub model: Model,
    #[command(flatten)]
    pub sampler: Sampler,
    #[command(flatten)]
    pub kv: Kv,
    /// Positions to make room for; those of the prompt and the most new tokens when not given
    #[arg(long, value_name = "N")]
    pub window: Option<usize>,
    /// The most new tokens
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub max_new: usize,
    /// Token ids in place of a prompt
    #[arg(long, value_name = "IDS", value_delimiter = ',', conflicts_with = "prompt")]
    pub prompt_tokens: Option<Vec<u32>>,
    /// Go on past the checkpoint's end-of-text token
    #[arg(long)]
    pub ignore_eos: bool,
    /// Print one JSON object at the end instead of text as it comes
    #[arg(long)]
    pub json: bool,
    /// The text to continue
    #[arg(required_unless_present = "prompt_tokens")]
    pub prompt: Option<String>,
}

/// How tokens are chosen: greedily, unless one of these is given.
#[derive(ClapArgs)]
pub struct Sampler {
    /// Draw from the softmax of the logits over T; 0 is greedy, 1 where another of these is given and T is not
    #[arg(long, value_name = "T")]
    pub temperature: Option<f32>,
    /// Draw among the K largest logits
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Draw among the most probable tokens that have P of the probability together
    #[arg(long, value_name = "P")]
    pub top_p: Option<f32>,
    /// What draws are derived from, with the position; 0 when not given
    #[arg(long, value_name = "S")]
    pub seed: Option<u64>,
}

/// Where keys and values are kept.
#[derive(ClapArgs)]
pub struct Kv {
    /// `bf16`, which is the host's own store (FP32 on the CPU), or a variant of decode_loop that is a store, such as `fp8_kv`
    #[arg(long, value_name = "VARIANT", default_value = Kv::HOST)]
    pub kv: String,
}

impl Kv {
    /// The host's own store.
    pub const HOST: &str = "bf16";
}

#[derive(ClapArgs)]
pub struct Synth {
    /// The host's shape: 27b or 35b-a3b
    pub shape: String,
    #[command(flatten)]
    pub bind: Bind,
    #[command(flatten)]
    pub kv: Kv,
    /// Tokens of the prompt, so that steps attend to as many
    #[arg(long, value_name = "N", default_value_t = 4096)]
    pub context: usize,
    /// Tokens to make
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub tokens: usize,
    /// What a streaming read of the GPU reaches, for the floor: 4650 on an H200
    #[arg(long, value_name = "GB/S", default_value_t = 4650.0)]
    pub read_gbs: f64,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(ClapArgs)]
pub struct Eval {
    #[command(flatten)]
    pub model: Model,
    #[command(flatten)]
    pub text: Tokens,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
}

#[derive(ClapArgs)]
pub struct Calibrate {
    /// Folder of a Hugging Face checkpoint: config.json, *.safetensors
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    #[command(flatten)]
    pub text: Tokens,
    /// Which quantile over the windows a channel gets, 0 to 1; 1 is the largest
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    pub percentile: f64,
    /// The JSON file to write
    #[arg(value_name = "FILE")]
    pub out: PathBuf,
}

/// The text to read.
#[derive(ClapArgs)]
pub struct Tokens {
    /// File of token ids, 16-bit little-endian
    #[arg(long, value_name = "FILE")]
    pub tokens: PathBuf,
    /// Tokens of a window; each window starts from a fresh state
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub window: usize,
    /// Tokens at the start of the file to leave out
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub skip: usize,
    /// Tokens to read at the most; all of the file's whole windows when not given
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
}
