use number_formats::nvfp4::ScaleMode;

/// What a bind may be told beyond the weights.
///
/// An implementation takes what concerns it and leaves the rest alone, so that one set of options can go with rules for
/// several variants. Its receipt says what it took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Whether NVFP4 weights and rows have a global scale above their block scales. Weights that are packed already keep the
    /// one they have.
    pub scale_mode: ScaleMode,
}
