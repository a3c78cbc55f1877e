//! Hosts that look their logits up: a loop's test needs no model.

use ::decode_loop::{Arm as Host, CpuHost, DecodeLoop, Door, HostShape, LoopOptions, Sequence};
use device::Device;
use structure_core::Refusal;

use crate::arm::Arm;

/// Which row of a table follows.
#[derive(Clone, Copy)]
pub enum By {
    /// That of the token that was read last.
    Token,
    /// That of its position; the first again after the last.
    Position,
}

/// Logits `[rows, vocab]`.
#[derive(Clone)]
pub struct Table {
    pub vocab: usize,
    pub by: By,
    pub logits: Vec<f32>,
}

impl Table {
    pub fn new(vocab: usize, by: By, logits: Vec<f32>) -> Self {
        Table { vocab, by, logits }
    }

    pub fn rows(&self) -> usize {
        self.logits.len() / self.vocab
    }

    fn row(&self, token: u32, position: usize) -> &[f32] {
        let row = match self.by {
            By::Token => token as usize,
            By::Position => position % self.rows(),
        };
        &self.logits[row * self.vocab..][..self.vocab]
    }

    /// Runs a trial with a loop over a host of this table, on an arm.
    pub fn with_loop<R>(&self, arm: &Arm, window: usize, trial: impl FnOnce(&mut dyn DecodeLoop) -> R) -> R {
        let options = LoopOptions { sequence: Sequence { window, ..Sequence::default() } };
        let door: Door = structures::decode_loop("whole_step").unwrap();
        match &arm.device {
            Device::Cpu => {
                let mut host = CpuTable { table: self, position: 0 };
                trial(&mut *door.build(Host::Cpu(&mut host), &options).unwrap())
            }
            #[cfg(kernels_built)]
            Device::Cuda(_) => {
                let mut host = gpu::CudaTable::new(&arm.stream(), self);
                trial(&mut *door.build(Host::Cuda(&mut host), &options).unwrap())
            }
            #[cfg(not(kernels_built))]
            Device::Cuda(_) => panic!("kernels are not built"),
        }
    }
}

struct CpuTable<'a> {
    table: &'a Table,
    position: usize,
}

impl CpuHost for CpuTable<'_> {
    fn shape(&self) -> HostShape {
        HostShape { vocab: self.table.vocab, max_positions: usize::MAX }
    }

    fn begin(&mut self, _: &Sequence<'_>) -> Result<(), Refusal> {
        Ok(())
    }

    fn kv_bytes(&self) -> u64 {
        0
    }

    fn reset(&mut self) -> Result<(), Refusal> {
        self.position = 0;
        Ok(())
    }

    fn forward(&mut self, tokens: &[u32]) -> Result<Vec<f32>, Refusal> {
        self.position += tokens.len();
        Ok(self.table.row(*tokens.last().unwrap(), self.position - 1).to_vec())
    }
}

#[cfg(kernels_built)]
pub mod gpu {
    use ::decode_loop::{CudaHost, HostShape, Sequence, StepBuffers};
    use device::{Buffer, Stream};
    use qwen3_5::cuda::Embed;
    use structure_core::{DType, Refusal};

    use super::{By, Table};

    /// The table in device memory, where a step looks a row up by the host's own embedding kernel.
    pub struct CudaTable {
        by: By,
        vocab: usize,
        /// A row of the device's table: longer than the vocabulary by NaN that nothing may read.
        width: usize,
        table: Buffer<f32>,
        logits: Buffer<f32>,
        tokens: Buffer<i32>,
        pub position: Buffer<i32>,
        stream: Stream,
    }

    impl CudaTable {
        pub fn new(stream: &Stream, table: &Table) -> Self {
            let width = table.vocab.next_multiple_of(4) + 4;
            let mut padded = vec![f32::NAN; table.rows() * width];
            for (padded, row) in padded.chunks_exact_mut(width).zip(table.logits.chunks_exact(table.vocab)) {
                padded[..table.vocab].copy_from_slice(row);
            }
            CudaTable {
                by: table.by,
                vocab: table.vocab,
                width,
                table: Buffer::from_host(stream, &padded, &[table.rows(), width]).unwrap(),
                logits: Buffer::zeros(stream, &[width]).unwrap(),
                tokens: Buffer::zeros(stream, &[1]).unwrap(),
                position: Buffer::zeros(stream, &[1]).unwrap(),
                stream: stream.clone(),
            }
        }
    }

    impl CudaHost for CudaTable {
        fn shape(&self) -> HostShape {
            HostShape { vocab: self.vocab, max_positions: usize::MAX }
        }

        fn stream(&self) -> &Stream {
            &self.stream
        }

        fn begin(&mut self, _: &Sequence<'_>) -> Result<(), Refusal> {
            Ok(())
        }

        fn kv_bytes(&self) -> u64 {
            0
        }

        fn reset(&mut self) -> Result<(), Refusal> {
            self.position.fill_bytes(&self.stream, 0)
        }

        fn prompt(&mut self, tokens: &[u32]) -> Result<(), Refusal> {
            let end = self.position.to_host(&self.stream)?[0] + tokens.len() as i32;
            self.tokens.copy_from_host(&self.stream, &[*tokens.last().unwrap() as i32])?;
            self.position.copy_from_host(&self.stream, &[end - 1])?;
            self.step(1)?;
            self.position.copy_from_host(&self.stream, &[end])
        }

        fn step(&mut self, _: usize) -> Result<(), Refusal> {
            let index = match self.by {
                By::Token => self.tokens.view(),
                By::Position => self.position.view(),
            };
            Embed {
                table: self.table.view().bits_as(DType::BF16)?,
                tokens: index,
                out: self.logits.view_mut().bits_as(DType::BF16)?,
                rows: 1,
                hidden: 2 * self.width,
            }
            .queue(&self.stream)
        }

        fn buffers(&mut self) -> Result<StepBuffers<'_>, Refusal> {
            Ok(StepBuffers {
                tokens: self.tokens.view_mut(),
                position: self.position.view_mut(),
                logits: self.logits.view_mut(),
            })
        }
    }
}
