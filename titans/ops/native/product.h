/* Small dense products that stay in the nearest cache, on vectors of whatever length the machine has. */
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#define LANES ((int)(VECTOR_BYTES / sizeof(REAL)))
#define BAND 6 /* rows whose sums are held in registers, two vectors each */

typedef REAL vec __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));

typedef struct {
    const REAL *at;
    size_t row, column; /* how far apart: a transposed matrix is one with the two exchanged */
} Strided;

#define KERNEL(NAME, ROWS, VECTORS)                                                                               \
    static inline __attribute__((always_inline)) void NAME(int depth, Strided a, const REAL *b, size_t b_row,     \
                                                           REAL *c, size_t c_row, int fresh) {                    \
        vec sum[ROWS][VECTORS];                                                                                   \
        for (int i = 0; i < ROWS; i++)                                                                            \
            for (int j = 0; j < VECTORS; j++) sum[i][j] = fresh ? (vec){0} : ((const vec *)(c + i * c_row))[j];   \
        for (int p = 0; p < depth; p++) {                                                                         \
            vec row[VECTORS];                                                                                     \
            for (int j = 0; j < VECTORS; j++) row[j] = ((const vec *)(b + p * b_row))[j];                         \
            for (int i = 0; i < ROWS; i++)                                                                        \
                for (int j = 0; j < VECTORS; j++) sum[i][j] += a.at[i * a.row + p * a.column] * row[j];           \
        }                                                                                                         \
        for (int i = 0; i < ROWS; i++)                                                                            \
            for (int j = 0; j < VECTORS; j++) ((vec *)(c + i * c_row))[j] = sum[i][j];                            \
    }
KERNEL(kernel_6x2, 6, 2)
KERNEL(kernel_4x2, 4, 2)
KERNEL(kernel_1x2, 1, 2)
KERNEL(kernel_6x1, 6, 1)
KERNEL(kernel_1x1, 1, 1)

static inline Strided below(Strided a, int rows) { return (Strided){a.at + rows * a.row, a.row, a.column}; }

/* c (rows x n) = a (rows x depth) b, or += if not fresh; at most BAND rows. */
static void band(int rows, int n, int depth, Strided a, const REAL *b, size_t b_row, REAL *c, size_t c_row, int fresh) {
    int j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES) {
        int i = 0;
        if (rows == 6) kernel_6x2(depth, a, b + j, b_row, c + j, c_row, fresh), i = 6;
        if (i + 4 <= rows) kernel_4x2(depth, a, b + j, b_row, c + j, c_row, fresh), i = 4;
        for (; i < rows; i++) kernel_1x2(depth, below(a, i), b + j, b_row, c + i * c_row + j, c_row, fresh);
    }
    for (; j + LANES <= n; j += LANES) {
        int i = 0;
        if (rows == 6) kernel_6x1(depth, a, b + j, b_row, c + j, c_row, fresh), i = 6;
        for (; i < rows; i++) kernel_1x1(depth, below(a, i), b + j, b_row, c + i * c_row + j, c_row, fresh);
    }
    for (; j < n; j++)
        for (int i = 0; i < rows; i++) {
            REAL sum = fresh ? 0 : c[i * c_row + j];
            for (int p = 0; p < depth; p++) sum += a.at[i * a.row + p * a.column] * b[p * b_row + j];
            c[i * c_row + j] = sum;
        }
}

static int band_of(int m, int i) { return m - i < BAND ? m - i : BAND; }

/* c (m x n) = a (m x depth) b (depth x n), or += if not fresh. */
static void product(int m, int n, int depth, Strided a, const REAL *b, size_t b_row, REAL *c, size_t c_row, int fresh) {
    for (int i = 0; i < m; i += BAND)
        band(band_of(m, i), n, depth, below(a, i), b, b_row, c + i * c_row, c_row, fresh);
}

/* The same for c (m x (offset + m)) that is only needed up to its diagonal, which stands `offset` columns in; what
 * lies a little beyond is written too, in whole vectors. */
static void product_below(int m, int offset, int depth, Strided a, const REAL *b, size_t b_row, REAL *c, size_t c_row) {
    for (int i = 0; i < m; i += BAND) {
        int needed = offset + i + band_of(m, i), n = (needed + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
        band(band_of(m, i), n < offset + m ? n : offset + m, depth, below(a, i), b, b_row, c + i * c_row, c_row, 1);
    }
}

/* The same for a whose last m columns are lower triangular, zeros stored above. */
static void lower_product(int m, int n, int offset, Strided a, const REAL *b, size_t b_row, REAL *c, size_t c_row,
                          int fresh) {
    for (int i = 0; i < m; i += BAND)
        band(band_of(m, i), n, offset + i + band_of(m, i), below(a, i), b, b_row, c + i * c_row, c_row, fresh);
}

/* c += a^T b for a lower triangular a (m x m), zeros stored above. */
static void lower_transposed_product(int m, int n, const REAL *a, size_t a_row, const REAL *b, size_t b_row, REAL *c,
                                     size_t c_row) {
    for (int i = 0; i < m; i += BAND) {
        Strided part = {a + i * a_row + i, 1, a_row};
        band(band_of(m, i), n, m - i, part, b + i * b_row, b_row, c + i * c_row, c_row, 0);
    }
}

static inline Strided plain(const REAL *a, size_t row) { return (Strided){a, row, 1}; }
static inline Strided turned(const REAL *a, size_t row) { return (Strided){a, 1, row}; }

/* b (n x m) = a^T for a (m x n) */
static void transpose(int m, int n, const REAL *restrict a, size_t a_row, REAL *restrict b, size_t b_row) {
    for (int top = 0; top < m; top += 8)
        for (int left = 0; left < n; left += 8) {
            int bottom = top + 8 < m ? top + 8 : m, right = left + 8 < n ? left + 8 : n;
            for (int i = top; i < bottom; i++)
                for (int j = left; j < right; j++) b[j * b_row + i] = a[i * a_row + j];
        }
}
