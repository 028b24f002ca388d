"""Operations on implicit arrays."""
