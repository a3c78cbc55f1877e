use thiserror::Error;

use crate::{Arch, Band, Bound, ComputeCapability, StructureId};

/// Why something was not done: the one error of the workspace.
///
/// Each prints as one line that names the thing, the value it had and the bound it broke.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// No linked crate registers an implementation of this structure.
    #[error(
        "unknown structure `{asked}`; linked here: {known} (an implementation crate that is listed in Cargo.toml \
         must also be named in code: `use its_crate as _;`)"
    )]
    UnknownStructure {
        /// The structure asked for.
        asked: String,
        /// Those that exist, comma-separated.
        known: String,
    },
    /// The structure exists, this variant of it does not.
    #[error("unknown variant `{asked}` of {structure}; linked here: {known}")]
    UnknownVariant {
        /// The structure asked for.
        structure: String,
        /// The variant asked for.
        asked: String,
        /// Those that exist, comma-separated.
        known: String,
    },
    /// Two linked crates register the same id.
    #[error("{id} is registered twice; link one crate that provides it")]
    DuplicateRegistration {
        /// The id that stands twice.
        id: StructureId,
    },
    /// A registration's factory is not of the type its structure's door expects.
    #[error(
        "{id} does not provide the factory of {structure}; it was built against another version of that crate"
    )]
    ForeignFactory {
        /// The registration found.
        id: StructureId,
        /// The structure whose door was used.
        structure: &'static str,
    },
    /// The crate is linked, its kernels were not built.
    #[error("{id} is linked but its kernels are not built: {reason}")]
    KernelsNotBuilt {
        /// The implementation.
        id: StructureId,
        /// Why, as the build script saw it.
        reason: String,
    },
    /// The kernels were built, none of them for this device.
    #[error("{id} is built for {built}, the device is {device}")]
    ArchUnsupported {
        /// The implementation.
        id: StructureId,
        /// The architectures that were built, comma-separated.
        built: String,
        /// The device's compute capability.
        device: ComputeCapability,
    },
    /// There is no usable device.
    #[error("no CUDA device: {reason}")]
    NoDevice {
        /// What was looked for and what was found.
        reason: String,
    },
    /// A CUDA call returned an error.
    #[error("{call} failed: {problem}")]
    Cuda {
        /// The call or the kernel's launcher.
        call: String,
        /// CUDA's name for the error.
        problem: String,
    },
    /// The device has less memory free than a bind or a loop needs.
    #[error("{what} needs {asked} bytes of device memory, {free} are free")]
    OutOfMemory {
        /// What was to be allocated.
        what: String,
        /// Bytes asked for.
        asked: u64,
        /// Bytes free when it was asked.
        free: u64,
    },
    /// A dimension is outside the envelope.
    #[error("{what}: {dim} = {value} is outside {bound}")]
    DimOutside {
        /// The seat or call.
        what: String,
        /// The dimension.
        dim: &'static str,
        /// Its value.
        value: u64,
        /// The values taken.
        bound: Bound,
    },
    /// A type that is not taken here.
    #[error("{what}: dtype {dtype} is not one of {accepted}")]
    DTypeOutside {
        /// The tensor or the rows.
        what: String,
        /// Its type, by name: a file may name one we do not know.
        dtype: String,
        /// The types taken.
        accepted: String,
    },
    /// A shape other than the one the context fixes.
    #[error("{what}: shape {got:?}, expected {expected:?}")]
    ShapeMismatch {
        /// The tensor or the rows.
        what: String,
        /// The shape it must have.
        expected: Vec<usize>,
        /// The shape it has.
        got: Vec<usize>,
    },
    /// A number outside of its bounds that is no dimension: a scale of a checkpoint, a setting.
    #[error("{what} is {value}; it must be {bound}")]
    ValueOutside {
        /// The number.
        what: String,
        /// Its value.
        value: String,
        /// What it must be.
        bound: String,
    },
    /// A weight, or a result that decides something, that is NaN or infinite.
    #[error("{what}: element {index} is {value}; it must be finite")]
    NonFinite {
        /// The tensor.
        what: String,
        /// The flat index of the first such element.
        index: usize,
        /// The element.
        value: f32,
    },
    /// Rows lie on another device than the seat.
    #[error("{what}: rows are on {rows}, the seat is on {seat}")]
    WrongDevice {
        /// The seat.
        what: String,
        /// Where the rows are.
        rows: String,
        /// Where the seat is bound.
        seat: String,
    },
    /// More rows than the seat serves, with no host form to hand them to.
    #[error("{what}: M = {m} is outside the band {band} and the seat has no host form to dispatch to")]
    BandExceeded {
        /// The seat.
        what: String,
        /// The rows of the call.
        m: usize,
        /// The rows it serves.
        band: Band,
    },
    /// A strict seat, or one without a host form, turned a call away.
    #[error("{seat}: {reason}; {policy}")]
    GuardRefused {
        /// The seat.
        seat: String,
        /// What was observed and what was bound.
        reason: String,
        /// Why no fallback was taken.
        policy: &'static str,
    },
    /// An implementation does not do what its structure asks.
    #[error("{what}: {gate} gate failed: {problem}")]
    GateFailed {
        /// The seat.
        what: String,
        /// Which gate.
        gate: &'static str,
        /// What was seen and what was expected.
        problem: String,
    },
    /// A file or folder cannot be read, or does not hold what it must.
    #[error("{path}: {problem}")]
    File {
        /// The file.
        path: String,
        /// What is wrong, with the value and its bound.
        problem: String,
    },
    /// A checkpoint lacks a tensor that the model needs.
    #[error("{path}: tensor `{tensor}` is missing")]
    MissingTensor {
        /// The checkpoint.
        path: String,
        /// The tensor.
        tensor: String,
    },
    /// A checkpoint holds tensors that nothing reads.
    #[error("{path}: {count} tensors are not read by the model, the first is `{first}`")]
    UnreadTensors {
        /// The checkpoint.
        path: String,
        /// How many there are.
        count: usize,
        /// The first of them by name.
        first: String,
    },
    /// A rule that cannot be read.
    #[error("rule `{rule}`: {problem}; write PATTERN=VARIANT")]
    MalformedRule {
        /// The rule.
        rule: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A pattern that selects no seat.
    #[error("pattern `{pattern}` matches none of the model's {seats} seats, such as `{example}`")]
    PatternMatchesNothing {
        /// The pattern.
        pattern: String,
        /// How many seats there are.
        seats: usize,
        /// One of them.
        example: String,
    },
    /// A variant that needs calibration data, and a bind without.
    #[error(
        "{seat}: {id} needs the largest magnitude of each input channel, and {missing}; `structures calibrate` records \
         it, `--calibration FILE` or `linear_proj::Options` brings it"
    )]
    NotCalibrated {
        /// The seat.
        seat: String,
        /// The implementation.
        id: StructureId,
        /// What is missing.
        missing: &'static str,
    },
    /// There is nothing to continue.
    #[error("the prompt is empty; at least one token is needed")]
    EmptyPrompt,
    /// A token id the model has no embedding for.
    #[error("token {token} is outside the vocabulary of {vocab}")]
    TokenOutside {
        /// The token id.
        token: u32,
        /// The size of the vocabulary.
        vocab: usize,
    },
    /// More positions than the model's window holds.
    #[error("{needed} positions are needed, the window holds {window}")]
    WindowExceeded {
        /// Positions asked for.
        needed: usize,
        /// Positions there are.
        window: usize,
    },
}

impl Refusal {
    /// A [`Refusal::File`] with what is wrong.
    pub fn file(path: impl AsRef<std::path::Path>, problem: impl std::fmt::Display) -> Self {
        Refusal::File { path: path.as_ref().display().to_string(), problem: problem.to_string() }
    }

    /// An [`Refusal::ArchUnsupported`] from the list of what was built.
    pub fn arch_unsupported(id: StructureId, built: &[Arch], device: ComputeCapability) -> Self {
        let built = built.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        Refusal::ArchUnsupported { id, built, device }
    }
}
