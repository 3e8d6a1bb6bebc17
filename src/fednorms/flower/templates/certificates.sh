#!/bin/sh
# Makes the keys and certificates of a deployment; needs openssl and ssh-keygen. Run it once, on the server:
#
#   ./certificates.sh            for the sites of this project
#
# It writes into ./certificates, and never overwrites anything:
#   ca.key                  signs the server's certificate. Keep it secret; nobody else needs it.
#   ca.crt                  give it to every site: a node checks the server with it.
#   server.key, server.pem  the server's key (secret) and certificate.
#   SITE.key                a site's key. Give it only to that site: the server recognizes the node by it.
#   SITE.pub                the public key; the server registers it (the last command of step 1 in README.md).
# A site can also make its key itself: it runs the ssh-keygen line below and sends you only SITE.pub.
set -eu
umask 077
host="@HOST@"
days=825
folder="$(dirname "$0")/certificates"
mkdir -p "$folder"
cd "$folder"

if [ ! -e ca.key ]; then
    openssl ecparam -name secp384r1 -genkey -noout -out ca.key
    openssl req -x509 -new -sha384 -days "$days" -key ca.key -out ca.crt -subj "/CN=fednorms deployment" \
        -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign"
fi

if [ ! -e server.key ]; then
    openssl ecparam -name secp384r1 -genkey -noout -out server.key
    openssl req -new -sha384 -key server.key -out server.csr -subj "/CN=$host"
    # The server can be reached by these names; nodes refuse it under any other.
    case "$host" in
        *[!0-9.]*) names="DNS:$host,DNS:localhost,IP:127.0.0.1" ;;
        *) names="IP:$host,DNS:localhost,IP:127.0.0.1" ;;
    esac
    printf 'subjectAltName=%s\nbasicConstraints=critical,CA:FALSE\nextendedKeyUsage=serverAuth\n' "$names" >server.ext
    openssl x509 -req -sha384 -days "$days" -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial \
        -extfile server.ext -out server.pem
    rm server.csr server.ext
fi

for site in @SITES@; do
    [ -e "$site.key" ] || ssh-keygen -q -t ecdsa -b 384 -N "" -C "$site" -f "$site.key"
    [ ! -e "$site.key.pub" ] || mv "$site.key.pub" "$site.pub"
done
echo "Made in $folder:"
ls -1
