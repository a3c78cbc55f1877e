//! The safe wrapper of the launchers. Nothing else touches the ffi.
#![allow(unsafe_code, reason = "the launchers are C functions")]

use std::ffi::CStr;
use std::sync::atomic::Ordering;

use decode_loop::{CudaHost, Request};
use device::{Buffer, MappedWords, Stream};
use structure_core::{DType, Refusal};

use crate::ffi;

/// Tokens that may come before the host has looked at the first of them.
const RING: usize = 64;

/// What chooses tokens on a device, with the state of one text.
pub(crate) struct Chooser {
    vocab: usize,
    clusters: bool,
    /// One `whole_step_state`.
    state: Buffer<u8>,
    /// `[ceil(vocab / 32)]`, a bit a token.
    stop: Buffer<i32>,
    ring: MappedWords,
}

impl Chooser {
    /// Allocates what a text needs, and loads the kernels, so that no later call does.
    pub fn new(stream: &Stream, vocab: usize) -> Result<Self, Refusal> {
        let device = stream.device();
        device.make_current()?;
        // SAFETY: the device's context is current.
        check("whole_step_prepare", unsafe { ffi::whole_step_prepare() })?;
        Ok(Chooser {
            vocab,
            clusters: device.compute_capability().major >= 9,
            state: Buffer::zeros(stream, &[size_of::<ffi::whole_step_state>()])?,
            stop: Buffer::zeros(stream, &[vocab.div_ceil(32)])?,
            ring: MappedWords::zeros(device, RING)?,
        })
    }

    /// Starts a text. The stream is idle.
    pub fn begin(&mut self, stream: &Stream, request: &Request<'_>) -> Result<(), Refusal> {
        let mut stop = vec![0i32; self.stop.len()];
        // A token outside the vocabulary is never made.
        for &token in request.stop.iter().filter(|&&token| (token as usize) < self.vocab) {
            stop[token as usize / 32] |= 1 << (token % 32);
        }
        self.stop.copy_from_host(stream, &stop)?;
        for word in self.ring.words() {
            word.store(0, Ordering::Relaxed);
        }
        let draw = request.sampler.draw()?;
        let arguments = ffi::whole_step_request {
            seed: draw.map_or(0, |draw| draw.seed),
            top_p: draw.map_or(0, |draw| draw.top_p),
            scale: draw.map_or(0.0, |draw| draw.scale),
            top_k: draw.map_or(0, |draw| draw.top_k),
            max_new: u32::try_from(request.max_new).unwrap_or(u32::MAX),
        };
        stream.device().make_current()?;
        let state = self.state.view_mut().pointer() as *mut ffi::whole_step_state;
        // SAFETY: the buffer holds one state.
        check("whole_step_begin", unsafe { ffi::whole_step_begin(&arguments, state, stream.raw().cast()) })
    }

    /// Queues the choice of a token from the first row of the host's logits: those of a step, or of a prompt.
    pub fn choose(&mut self, host: &mut dyn CudaHost, after_step: bool) -> Result<(), Refusal> {
        let stream = host.stream().clone();
        let buffers = host.buffers()?;
        for (what, view, dtype, len) in [
            ("logits of a step", &buffers.logits, DType::F32, self.vocab),
            ("tokens of a step", &buffers.tokens, DType::I32, 1),
            ("position of a step", &buffers.position, DType::I32, 1),
        ] {
            view.expect(what, dtype, len, &stream)?;
        }
        let arguments = ffi::whole_step_choose_call {
            logits: buffers.logits.pointer() as *const _,
            stop: self.stop.view().pointer() as *const _,
            state: self.state.view_mut().pointer() as *mut _,
            ring: self.ring.view_mut().pointer() as *mut _,
            token: buffers.tokens.pointer() as *mut _,
            position: buffers.position.pointer() as *mut _,
            vocab: self.vocab as i64,
            ring_len: RING as i32,
            advance: after_step.into(),
            clusters: self.clusters.into(),
            overlap: stream.overlap().into(),
        };
        stream.device().make_current()?;
        // SAFETY: the host's views were checked to hold what the call reads and writes, and stay where they are as long as its
        // sequence; the loop holds the host. The other pointers are this chooser's own.
        check("whole_step_choose", unsafe { ffi::whole_step_choose(&arguments, stream.raw().cast()) })
    }

    /// Token `index` of the text, once it is there.
    ///
    /// # Errors
    /// [`Refusal::NonFinite`] when there is none.
    pub fn token(&self, index: usize) -> Result<Option<u32>, Refusal> {
        let word = self.ring.words()[index % RING].load(Ordering::Acquire);
        if word >> 32 != index as u64 + 1 {
            return Ok(None);
        }
        let id = word as u32 & ((1 << ffi::WHOLE_STEP_ID_BITS) - 1);
        let value = match word as u32 >> ffi::WHOLE_STEP_ID_BITS {
            ffi::WHOLE_STEP_TOKEN => return Ok(Some(id)),
            ffi::WHOLE_STEP_INFINITE => f32::INFINITY,
            ffi::WHOLE_STEP_MINUS_INFINITE => f32::NEG_INFINITY,
            _ => f32::NAN,
        };
        Err(Refusal::NonFinite { what: "logits".to_string(), index: id as usize, value })
    }
}

fn check(call: &str, code: i32) -> Result<(), Refusal> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: the runtime returns a static, NUL-terminated name for every code, known or not.
    let name = unsafe { CStr::from_ptr(ffi::whole_step_error(code)) };
    Err(Refusal::Cuda { call: call.to_string(), problem: name.to_string_lossy().into_owned() })
}
