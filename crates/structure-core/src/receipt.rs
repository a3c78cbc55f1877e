use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::{Band, DType, Formats, StructureId};

/// What the bind-time smoke saw: one small call held against the FP64 reference.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Smoke {
    /// Rows of the call.
    pub rows: usize,
    /// The largest error as a fraction of its bound, at most 1.
    pub worst: f64,
}

/// What was bound where: written once at bind, never changed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Receipt {
    /// The implementation.
    pub id: StructureId,
    /// The seat's path.
    pub seat: String,
    /// Where it runs: `cpu`, or the device's name and ordinal.
    pub device: String,
    /// Output features, input features.
    pub dims: [usize; 2],
    /// Whether a bias is added.
    pub bias: bool,
    /// The type the weights came in.
    pub source_dtype: DType,
    /// How weights and activations are held.
    pub formats: Formats,
    /// Bytes of packed weights, scales and bias.
    pub weight_bytes: u64,
    /// Relative L2 distance of the dequantised weights from the source, over the whole tensor.
    pub conversion_error: f64,
    /// Rows that it serves itself.
    pub band: Band,
    /// The bind-time smoke.
    pub smoke: Smoke,
    /// sha256 of the kernel sources, in hex.
    pub kernel_source: String,
    /// Version of the implementation crate.
    pub version: String,
}

impl Receipt {
    /// sha256 of the canonical JSON (keys sorted, no white space), in hex.
    pub fn digest(&self) -> String {
        // A receipt holds strings, numbers and lists only, so it always becomes a value; serde_json's map is sorted.
        let canonical = serde_json::to_value(self).map(|value| value.to_string()).unwrap_or_default();
        Sha256::digest(canonical).iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn receipt() -> Receipt {
        Receipt {
            id: StructureId { structure: "linear_proj", variant: "w8a16_static" },
            seat: "lm_head".to_string(),
            device: "cpu".to_string(),
            dims: [2048, 256],
            bias: false,
            source_dtype: DType::BF16,
            formats: Formats { weights: "INT8 per channel", activations: "BF16" },
            weight_bytes: 532_480,
            conversion_error: 0.0078125,
            band: Band { min: 1, max: 16 },
            smoke: Smoke { rows: 1, worst: 0.25 },
            kernel_source: String::new(),
            version: "0.1.0".to_string(),
        }
    }

    /// The digest was computed outside, with sha256sum over the canonical JSON written by hand.
    #[test]
    fn the_digest_is_that_of_the_canonical_json() {
        let canonical = concat!(
            r#"{"band":{"max":16,"min":1},"bias":false,"conversion_error":0.0078125,"device":"cpu","dims":[2048,256],"#,
            r#""formats":{"activations":"BF16","weights":"INT8 per channel"},"id":"linear_proj/w8a16_static","#,
            r#""kernel_source":"","seat":"lm_head","smoke":{"rows":1,"worst":0.25},"#,
            r#""source_dtype":"BF16","version":"0.1.0","weight_bytes":532480}"#
        );
        assert_eq!(serde_json::to_value(receipt()).unwrap().to_string(), canonical);
        let expected = "fe472c1a91dcb16f557b151c79f10ccdd7c78795f16ba9e9f821d698aa8964e9";
        assert_eq!(receipt().digest(), expected);
    }

    #[test]
    fn any_change_changes_the_digest() {
        let mut changed = receipt();
        changed.conversion_error = 0.0078126;
        assert_ne!(changed.digest(), receipt().digest());
    }
}
