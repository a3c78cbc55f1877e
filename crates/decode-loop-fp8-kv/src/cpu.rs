//! The CPU arm: the same codes in memory, and what they stand for in FP32.

use decode_loop::{CpuKv, KvScale};
use half::bf16;
use number_formats::e4m3;

/// One layer's keys and values.
pub(crate) struct Fp8Layer {
    head_dim: usize,
    heads: Vec<Head>,
}

/// Those of one KV head; both `[seq_len, head_dim]`.
struct Head {
    scale: KvScale,
    keys: Vec<u8>,
    values: Vec<u8>,
}

/// The code of an element: rounded to BF16, as the kernel is given it, divided by the scale, rounded again. NaN keeps its sign.
fn encode(element: f32, scale: f32) -> u8 {
    let element = bf16::from_f32(element).to_f32();
    e4m3::encode_saturating(if element.is_nan() { element } else { element / scale })
}

impl Fp8Layer {
    /// An empty layer with a head for each scale.
    pub fn new(head_dim: usize, scales: &[KvScale]) -> Self {
        let head = |&scale| Head { scale, keys: Vec::new(), values: Vec::new() };
        Fp8Layer { head_dim, heads: scales.iter().map(head).collect() }
    }
}

impl CpuKv for Fp8Layer {
    fn seq_len(&self) -> usize {
        self.heads.first().map_or(0, |head| head.keys.len() / self.head_dim)
    }

    fn shape(&self) -> [usize; 2] {
        [self.heads.len(), self.head_dim]
    }

    fn bytes(&self) -> u64 {
        self.heads
            .iter()
            .map(|head| (head.keys.len() + head.values.len() + size_of::<KvScale>()) as u64)
            .sum()
    }

    fn clear(&mut self) {
        for head in &mut self.heads {
            head.keys.clear();
            head.values.clear();
        }
    }

    fn append(&mut self, keys: &[f32], values: &[f32]) {
        let heads = self.heads.len();
        for (index, (keys, values)) in
            keys.chunks_exact(self.head_dim).zip(values.chunks_exact(self.head_dim)).enumerate()
        {
            let head = &mut self.heads[index % heads];
            head.keys.extend(keys.iter().map(|&key| encode(key, head.scale.k)));
            head.values.extend(values.iter().map(|&value| encode(value, head.scale.v)));
        }
    }

    fn attend(&self, kv_head: usize, seq_len: usize, query: &[f32], scores: &mut Vec<f32>, out: &mut [f32]) {
        let head = &self.heads[kv_head];
        let scale = (self.head_dim as f32).powf(-0.5) * head.scale.k;
        let query: Vec<f32> = query.iter().map(|&element| bf16::from_f32(element).to_f32()).collect();
        let score = |key: &[u8]| {
            let products = query.iter().zip(key).map(|(&element, &code)| element * e4m3::decode(code));
            products.sum::<f32>() * scale
        };
        scores.clear();
        scores.extend(head.keys.chunks_exact(self.head_dim).take(seq_len).map(score));

        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut total = 0.0;
        out.fill(0.0);
        for (score, value) in scores.iter().zip(head.values.chunks_exact(self.head_dim)) {
            let weight = (score - largest).exp();
            total += weight;
            for (out, &code) in out.iter_mut().zip(value) {
                *out += weight * e4m3::decode(code);
            }
        }
        out.iter_mut().for_each(|out| *out = *out / total * head.scale.v);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_of_the_quotient_and_only_nan_becomes_nan() {
        for (element, scale, code) in [
            (1.0, 1.0, 0x38),
            (1.0, 0.5, 0x40),
            (-3.0, 3.0, 0xb8),
            (1e30, 1.0, 0x7e),
            (-1e30, 1e-30, 0xfe),
            (f32::INFINITY, 2.0, 0x7e),
            (f32::NAN.copysign(1.0), 2.0, 0x7f),
            (f32::NAN.copysign(-1.0), 2.0, 0xff),
            (-0.0, 2.0, 0x80),
            // 17 lies between 16 and 18, and goes to the even code.
            (17.0, 1.0, 0x58),
            (19.0, 1.0, 0x5a),
        ] {
            assert_eq!(encode(element, scale), code, "{element} / {scale}");
        }
    }

    #[test]
    fn a_query_sees_the_rows_before_it_and_no_others() {
        let scale = KvScale { k: 0.25, v: 2.0 };
        let mut layer = Fp8Layer::new(64, &[scale, KvScale::default()]);
        // Keys that all score the same: the result is the mean of the values.
        let row = |value: f32| [[value; 64], [100.0 * value; 64]].concat();
        layer.append(&[0.0; 128], &row(1.0));
        layer.append(&[0.0; 128], &row(2.0));
        layer.append(&[f32::NAN; 128], &row(f32::NAN));
        assert_eq!((layer.seq_len(), layer.shape(), layer.bytes()), (3, [2, 64], 2 * 2 * 3 * 64 + 2 * 8));
        let (mut out, mut scores) = ([7.0; 64], Vec::new());
        layer.attend(0, 2, &[1.0; 64], &mut scores, &mut out);
        assert_eq!(out, [1.5; 64]);
        // 100 and 200 are between codes: 96 or 104, 192 or 208, ties to even.
        layer.attend(1, 2, &[1.0; 64], &mut scores, &mut out);
        assert_eq!(out, [(96.0 + 192.0) / 2.0; 64]);
        layer.attend(0, 3, &[1.0; 64], &mut scores, &mut out);
        assert!(out.iter().all(|out| out.is_nan()));
        layer.clear();
        assert_eq!((layer.seq_len(), layer.bytes()), (0, 16));
    }
}
